// Wakes processes that wait for something to happen in memory that they share. No torch header.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace fastsync::comm {

class FutexEvent {
 public:
  using Clock = std::chrono::steady_clock;

  // In shared memory, zeros at first.
  struct Words {
    alignas(64) std::atomic<uint32_t> changes;  // the futex
    std::atomic<uint32_t> sleepers;
  };

  explicit FutexEvent(Words& words) : words_(words) {}

  // Wakes all waiters, after something that one may wait for has come true.
  void notify() {
    words_.changes.fetch_add(1);
    if (words_.sleepers.load() != 0) call(FUTEX_WAKE, INT_MAX, nullptr);
  }

  // Returns whether `done` has come true, by `end` at the latest. `idle` is called at times at
  // which nothing rings; it may throw.
  template <class Done, class Idle>
  bool wait_until(const Done& done, Clock::time_point end, const Idle& idle) {
    for (int i = 0; i < kSpins; ++i) {
      if (done()) return true;
      pause_briefly();
    }
    while (!done()) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
      if (left.count() <= 0) return false;
      const uint32_t seen = words_.changes.load();
      words_.sleepers.fetch_add(1);
      const bool woken = done() || sleep(seen, std::min(kLook, left));
      words_.sleepers.fetch_sub(1);
      if (!woken && !done()) idle();
    }
    return true;
  }

 private:
  // How often a waiter checks whether the other ranks are alive.
  static constexpr std::chrono::milliseconds kLook{200};
  // The time that waking another process takes. Ranks often share cores, so no longer.
  static constexpr int kSpins = 100;

  static void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
  }
  // Returns whether something woke it.
  bool sleep(uint32_t seen, std::chrono::milliseconds time) {
    const auto count = time.count();
    timespec limit{static_cast<time_t>(count / 1000), static_cast<long>(count % 1000) * 1000000};
    return call(FUTEX_WAIT, seen, &limit) == 0 || errno != ETIMEDOUT;
  }
  // Between processes: not FUTEX_PRIVATE.
  long call(int operation, uint32_t value, timespec* limit) {
    auto* const word = reinterpret_cast<uint32_t*>(&words_.changes);
    return syscall(SYS_futex, word, operation, value, limit, nullptr, 0);
  }

  Words& words_;
};

}  // namespace fastsync::comm
