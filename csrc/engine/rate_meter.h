// How fast buckets travel: for the size of the next plan's.
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
  // A function for the end of a collective that starts here and moves `bytes`; calls `next` after
  // it. It may be called from any thread, and outlive the meter.
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

  // Bytes per second of the fastest so far; 0: none.
  double best() const { return best_->load(); }

 private:
  std::shared_ptr<std::atomic<double>> best_ = std::make_shared<std::atomic<double>>(0.0);
};

}  // namespace fastsync::engine
