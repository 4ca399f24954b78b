#include <torch/csrc/distributed/c10d/python_comm_hook.h>

#include <future>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>

#include "../check.h"
#include "../ops/buffers.h"
#include "python.h"

namespace fastsync::comm {
namespace {

class HookInFlight final : public InFlight {
 public:
  HookInFlight(std::shared_ptr<c10d::CommHookInterface> hook, c10d::GradBucket bucket)
      : buffer_(bucket.getBuffer()),
        hook_(std::move(hook)),
        bucket_(std::move(bucket)),
        future_(hook_->runHook(bucket_)) {
    FS_CHECK(future_, "the communication hook returned no future");
  }

  // A hook that nobody has waited for still writes to the buffer, on a device in streams of its own
  // choice.
  ~HookInFlight() override {
    if (!future_ || waited_ || buffer_.is_cpu()) return;
    future_->addCallback([buffer = buffer_](c10::ivalue::Future&) { ops::record_here(buffer); });
  }

  at::Tensor wait() override {
    future_->wait();
    waited_ = true;
    if (told_.valid()) told_.wait();
    FS_CHECK(!future_->hasError(),
             "the communication hook failed: ", future_->tryRetrieveErrorMessage());
    return hook_->parseHookResult(future_->value());
  }

  void on_done(std::function<void()> fn) override {
    const auto told = std::make_shared<std::promise<void>>();
    told_ = told->get_future();
    future_->addCallback([fn = std::move(fn), told](c10::ivalue::Future&) {
      fn();
      told->set_value();
    });
  }

 private:
  at::Tensor buffer_;
  bool waited_ = false;
  std::future<void> told_;  // a future's callbacks run after its waiters have been woken
  std::shared_ptr<c10d::CommHookInterface> hook_;
  c10d::GradBucket bucket_;  // hooks may set another buffer, and refer to it until they are done
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

c10d::GradBucket grad_bucket(const HookBucket& bucket) {
  std::vector<size_t> offsets;
  std::vector<size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  std::vector<at::Tensor> parameters;
  for (const HookSlot& slot : bucket.slots) {
    offsets.push_back(slot.offset);
    lengths.push_back(slot.numel);
    sizes.push_back(slot.sizes);
    parameters.push_back(slot.parameter);
  }
  return c10d::GradBucket(bucket.index, bucket.count, bucket.buffer, offsets, lengths, sizes,
                          parameters, std::nullopt);
}

}  // namespace

Hook make_python_hook(pybind11::object state, pybind11::object hook) {
  const auto made = std::make_shared<c10d::PythonCommHook>(std::move(state), std::move(hook));
  return [made](const HookBucket& bucket) {
    return std::make_unique<HookInFlight>(made, grad_bucket(bucket));
  };
}

}  // namespace fastsync::comm
