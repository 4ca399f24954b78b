// The threads of a warp as fibers, so that a kernel with shuffles runs on the host as it is
// written.
//
// A thread that shuffles leaves its value and waits until all threads of its warp have; a warp
// whose threads disagree on whether to shuffle, undefined on the device, is an error here. Threads
// that never wait share one fiber.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

namespace cuda_shim {

constexpr unsigned kWarpSize = 32;

class Warp {
 public:
  static Warp& instance() {
    static Warp warp;
    return warp;
  }

  // Calls body(first), ..., body(first + count - 1), and sets `index` to the argument whenever one
  // of them runs.
  template <class Body>
  void run(unsigned& index, unsigned first, unsigned count, const Body& body) {
    index_ = &index;
    first_ = first;
    next_ = first;
    end_ = first + count;
    body_ = [](const void* self, unsigned i) { (*static_cast<const Body*>(self))(i); };
    self_ = &body;
    waiting_.clear();
    for (size_t i = 0; next_ != end_; ++i) resume(fiber(i));
    while (!waiting_.empty()) shuffle_round(count);
  }

  uint32_t shuffle_xor(uint32_t value, unsigned lanes) {
    const unsigned lane = *index_ - first_;
    const bool turn = turn_[lane] =
        !turn_[lane];  // the next shuffle must not overwrite what others still read
    values_[turn][lane] = value;
    wait();
    return values_[turn][(lane ^ lanes) % kWarpSize];
  }

 private:
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    unsigned index;  // of the thread that waits in it
  };
  static constexpr size_t kStack = size_t{1} << 18;

  Fiber& fiber(size_t i) {
    while (fibers_.size() <= i) {
      auto fiber = std::make_unique<Fiber>();
      fiber->stack.reset(new char[kStack]);  // pages that are never written take no memory
      getcontext(&fiber->context);
      fiber->context.uc_stack.ss_sp = fiber->stack.get();
      fiber->context.uc_stack.ss_size = kStack;
      fiber->context.uc_link = nullptr;
      makecontext(&fiber->context, [] { instance().work(); }, 0);
      fibers_.push_back(std::move(fiber));
    }
    return *fibers_[i];
  }

  // Runs one thread after another until one waits, or none is left.
  void work() {
    Stack::returned(nullptr);
    for (;;) {
      while (next_ != end_) {
        *index_ = next_++;
        turn_[(*index_ - first_) % kWarpSize] = false;
        body_(self_, *index_);
      }
      suspend();
    }
  }

  void resume(Fiber& fiber) {
    current_ = &fiber;
    const Stack stack(fiber.stack.get(), kStack);
    swapcontext(&main_, &fiber.context);
  }

  void suspend() {
    const Stack stack(main_stack_, main_size_);
    swapcontext(&current_->context, &main_);
  }

  // Tells AddressSanitizer that another stack is in use until this object's function goes on.
  class Stack {
   public:
#ifdef __SANITIZE_ADDRESS__
    Stack(const void* stack, size_t size) { __sanitizer_start_switch_fiber(&own_, stack, size); }
    ~Stack() { returned(own_); }
    static void returned(void* own) {
      Warp& warp = instance();
      const void* from;
      size_t size;
      __sanitizer_finish_switch_fiber(own, &from, &size);
      if (from != warp.current_->stack.get()) {
        warp.main_stack_ = from;
        warp.main_size_ = size;
      }
    }

   private:
    void* own_ = nullptr;
#else
    Stack(const void*, size_t) {}
    static void returned(void*) {}
#endif
  };

  void wait() {
    current_->index = *index_;
    waiting_.push_back(current_);
    suspend();
  }

  void shuffle_round(unsigned count) {
    if (waiting_.size() != count) {
      fibers_.clear();  // those that wait will never go on
      throw std::logic_error("threads of a warp disagree on whether to shuffle");
    }
    const std::vector<Fiber*> ready = std::move(waiting_);
    waiting_.clear();
    for (Fiber* fiber : ready) {
      *index_ = fiber->index;
      resume(*fiber);
    }
  }

  unsigned* index_ = nullptr;
  unsigned first_ = 0, next_ = 0, end_ = 0;
  void (*body_)(const void*, unsigned) = nullptr;
  const void* self_ = nullptr;
  bool turn_[kWarpSize] = {};
  uint32_t values_[2][kWarpSize] = {};
  ucontext_t main_;
  const void* main_stack_ = nullptr;
  size_t main_size_ = 0;
  Fiber* current_ = nullptr;
  std::vector<Fiber*> waiting_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
};

}  // namespace cuda_shim
