// Measures how fast buckets travel, for the bucket sizes of the next plan.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

namespace fastsync::engine {

class RateMeter {
 public:
  // Returns a function to call at the end of a collective that starts now and moves `bytes`; it
  // calls `next` afterwards. It may run on any thread, and after the meter is gone.
  std::function<void()> timed(int64_t bytes, std::function<void()> next) {
    const auto start = std::chrono::steady_clock::now();
    return [best = best_, start, bytes, next = std::move(next)] {
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      const double rate = static_cast<double>(bytes) / (took.count() + 1e-9);
      double seen = best->load();
      while (seen < rate && !best->compare_exchange_weak(seen, rate)) {
      }
      if (next) next();
    };
  }

  // Returns the bytes per second of the fastest collective so far; 0: none.
  double best() const { return best_->load(); }

 private:
  std::shared_ptr<std::atomic<double>> best_ = std::make_shared<std::atomic<double>>(0.0);
};

}  // namespace fastsync::engine
