#include "incoming.h"

#include <utility>

#include "../ops/ops.h"

namespace fastsync::comm {
namespace {

class Received final : public Incoming {
 public:
  Received(std::unique_ptr<InFlight> arriving, MessageBuffers buffers, int64_t parts,
           std::shared_ptr<ops::BufferPool> pool)
      : arriving_(std::move(arriving)), buffers_(std::move(buffers)), pool_(std::move(pool)) {
    const at::Tensor& received = buffers_.received;
    const int64_t each = received.numel() / parts;
    for (int64_t i = 0; i < parts; ++i) {
      const auto part = ops::SlotLayout::run(i * each, each);
      parts_.push_back(ops::view_of(received, part, received.scalar_type()));
    }
  }
  ~Received() override { end(/*in_flight=*/true); }
  Received(const Received&) = delete;
  Received& operator=(const Received&) = delete;

  at::Tensor wait() override { return arriving_->wait(); }
  void on_done(std::function<void()> fn) override { arriving_->on_done(std::move(fn)); }
  bool is_done_within(std::chrono::milliseconds time) override {
    return arriving_->is_done_within(time);
  }
  bool can_be_asked() const override { return arriving_->can_be_asked(); }

  const std::vector<at::Tensor>& parts() const override { return parts_; }
  void release() override {
    parts_.clear();
    end(/*in_flight=*/false);
  }

 private:
  void end(bool in_flight) {
    pool_->end(std::exchange(buffers_.received, at::Tensor()), in_flight);
    pool_->end(std::exchange(buffers_.sent, at::Tensor()), in_flight);
  }

  std::unique_ptr<InFlight> arriving_;
  MessageBuffers buffers_;
  std::shared_ptr<ops::BufferPool> pool_;
  std::vector<at::Tensor> parts_;
};

}  // namespace

std::shared_ptr<Incoming> incoming_in(std::unique_ptr<InFlight> arriving, MessageBuffers buffers,
                                      int64_t parts, std::shared_ptr<ops::BufferPool> pool) {
  return std::make_shared<Received>(std::move(arriving), std::move(buffers), parts,
                                    std::move(pool));
}

}  // namespace fastsync::comm
