// Work that has been started between ranks, and ends at some time.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace fastsync::comm {

// A collective that has been started. Keeps its buffers alive; destroying it does not cancel it.
class InFlight {
 public:
  virtual ~InFlight() = default;

  // CPU backends: blocks until the result is there. Stream backends (NCCL): makes the current
  // stream wait for it. Returns the tensor with the result, undefined where that is the buffer
  // itself. Throws what the backend throws.
  virtual at::Tensor wait() = 0;

  // Calls `fn` once when the collective has completed or failed: from any thread, at once where it
  // has already, and before a blocking wait() returns. On stream backends the current stream is
  // then one that waits for the result. Where the backend cannot tell, it is called by wait().
  virtual void on_done(std::function<void()> fn) = 0;

  // Whether wait() would return at once; waits so long at most for that to come true, where the
  // backend can wait. Never where it cannot tell.
  virtual bool is_done_within(std::chrono::milliseconds /*time*/) { return false; }
  // Whether is_done_within() waits, and comes true before wait() returns or throws.
  virtual bool can_be_asked() const { return false; }
};

// An InFlight with another holder.
class SharedInFlight final : public InFlight {
 public:
  explicit SharedInFlight(std::shared_ptr<InFlight> held) : held_(std::move(held)) {}

  at::Tensor wait() override { return held_->wait(); }
  void on_done(std::function<void()> fn) override { held_->on_done(std::move(fn)); }
  bool is_done_within(std::chrono::milliseconds time) override {
    return held_->is_done_within(time);
  }
  bool can_be_asked() const override { return held_->can_be_asked(); }

 private:
  std::shared_ptr<InFlight> held_;
};

// Data of other ranks for this one, in memory that it reads for a while: theirs, or a buffer that
// messages arrive in. Neither end waits for another rank: that of release(), nor that of one which
// never was given back.
class Incoming : public InFlight {
 public:
  // After wait(): equal parts, from each other rank, in their order; or those that were expected.
  virtual const std::vector<at::Tensor>& parts() const = 0;
  // They are not read any more.
  virtual void release() = 0;
};

// Base of work whose end only wait() reports: it calls what on_done() was given. `Base` is or
// extends InFlight.
template <class Base = InFlight>
class CalledByWait : public Base {
 public:
  void on_done(std::function<void()> fn) override { fn_ = std::move(fn); }

 protected:
  void call() {
    if (fn_) std::exchange(fn_, nullptr)();
  }

 private:
  std::function<void()> fn_;
};

}  // namespace fastsync::comm
