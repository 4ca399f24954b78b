#include "comm/pipeline.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "check.h"

namespace fastsync::comm {
namespace {

class OnWorker final : public InFlight {
 public:
  explicit OnWorker(std::shared_ptr<Ticket> ticket) : ticket_(std::move(ticket)) {}

  at::Tensor wait() override {
    ticket_->wait();
    return {};
  }
  void on_done(std::function<void()> fn) override { ticket_->on_done(std::move(fn)); }
  bool is_done_within(std::chrono::milliseconds time) override {
    return ticket_->is_done_within(time);
  }
  bool can_be_asked() const override { return true; }

 private:
  std::shared_ptr<Ticket> ticket_;
};

class OnStream final : public InFlight {
 public:
  OnStream(Stages stages, c10::Stream stream)
      : stages_(std::move(stages)), stream_(stream), done_(stream.device_type()) {
    done_.record(stream);
  }

  // A pipeline without a waiter still uses its buffers, and their memory goes back to a stream that
  // must have come past it.
  ~OnStream() override {
    try {
      if (!waited_) wait();
    } catch (const std::exception&) {
      // The device is broken, and its next user will say so.
    }
  }

  at::Tensor wait() override {
    waited_ = true;
    const c10::Device device = done_.device();
    done_.block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    return {};
  }

  // Called by the host at once, after everything that the stream holds.
  void on_done(std::function<void()> fn) override {
    const c10::StreamGuard on_stream(stream_);
    fn();
  }

 private:
  Stages stages_;  // which holds buffers
  c10::Stream stream_;
  c10::Event done_;
  bool waited_ = false;
};

class AllOf final : public InFlight {
 public:
  explicit AllOf(std::vector<std::unique_ptr<InFlight>> parts) : parts_(std::move(parts)) {}

  at::Tensor wait() override {
    at::Tensor first;
    for (const auto& part : parts_) {
      const at::Tensor result = part->wait();
      if (part == parts_.front()) first = result;
    }
    return first;
  }

  void on_done(std::function<void()> fn) override {
    if (parts_.empty()) return fn();
    const auto left = std::make_shared<std::atomic<size_t>>(parts_.size());
    for (const auto& part : parts_) {
      part->on_done([left, fn] {
        if (--*left == 0) fn();
      });
    }
  }

  bool is_done_within(std::chrono::milliseconds time) override {
    return std::all_of(parts_.begin(), parts_.end(),
                       [&](const auto& part) { return part->is_done_within(time); });
  }
  bool can_be_asked() const override {
    return std::all_of(parts_.begin(), parts_.end(),
                       [](const auto& part) { return part->can_be_asked(); });
  }

 private:
  std::vector<std::unique_ptr<InFlight>> parts_;
};

}  // namespace

std::unique_ptr<InFlight> all_of(std::vector<std::unique_ptr<InFlight>> parts) {
  if (parts.size() == 1) return std::move(parts.front());
  return std::make_unique<AllOf>(std::move(parts));
}

std::unique_ptr<InFlight> Pipelines::run(size_t count, Stages stages, at::Device device) {
  FS_ASSERT(count <= groups_.size(), "a pipeline of ", count, " stages needs as many ",
            "process groups, but there are ", groups_.size());
  return device.is_cpu() ? run_on_worker(std::move(stages))
                         : run_on_stream(count, std::move(stages), device);
}

std::unique_ptr<InFlight> Pipelines::run_on_worker(Stages stages) {
  if (!worker_) worker_ = std::make_unique<Worker>();
  std::shared_ptr<InFlight> first = stages(0, *groups_.front());
  return std::make_unique<OnWorker>(
      worker_->submit([stages = std::move(stages), groups = groups_, current = std::move(first),
                       index = size_t{0}]() mutable {
        current->wait();
        ++index;
        current = stages(index, *groups[std::min(index, groups.size() - 1)]);
        return current != nullptr;
      }));
}

std::unique_ptr<InFlight> Pipelines::run_on_stream(size_t count, Stages stages, at::Device device) {
  const c10::impl::VirtualGuardImpl backend(device.type());
  while (streams_.size() < kStreams) {
    streams_.push_back(backend.getStreamFromGlobalPool(device, /*isHighPriority=*/true));
  }
  const c10::Stream stream = streams_[runs_++ % kStreams];
  c10::Event packed(device.type());
  packed.record(backend.getStream(device));
  packed.block(stream);
  const c10::StreamGuard on_stream(stream);
  for (size_t i = 0; i <= count; ++i) {
    const auto current = stages(i, group(i));
    if (!current) break;
    current->wait();
  }
  return std::make_unique<OnStream>(std::move(stages), stream);
}

}  // namespace fastsync::comm
