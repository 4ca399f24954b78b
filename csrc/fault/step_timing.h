// Splits the time of this rank's steps by activity, to find the rank that the others wait for.
//
// At every moment a rank is in one activity, so the times of a step add up to its length. A change
// costs one reading of the clock; a step has about six changes, and two per bucket.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace fastsync::engine {

enum class Activity : uint8_t {
  kBetweenSteps,  // data, the optimizer, backwards under no_sync(): all that is none of the others
  kForward,       // up to the start of the backward
  kBackward,
  kPacking,  // and handing buckets to the backend
  kWaiting,  // for averages, rank 0's buffers, or parameters
};
constexpr size_t kActivities = 5;
using Times = std::array<int64_t, kActivities>;  // nanoseconds, by activity

class StepTiming {
 public:
  // Steps over which times are averaged. Windows begin after the same steps on every rank.
  static constexpr int64_t kWindow = 50;

  // Starts `activity`. Returns the one before.
  Activity reach(Activity activity);
  // Drops the times of the running step: the ranks have planned.
  void restart();
  // Returns the nanoseconds so far, up to the last change, in which this rank did not wait.
  int64_t busy() const { return busy_; }
  // Ends the step number `steps`. Returns the means of its window if it is the last step of it.
  std::optional<Times> end_step(int64_t steps);

 private:
  Activity activity_ = Activity::kBetweenSteps;
  int64_t since_ = 0;  // steady clock; 0: nothing has begun
  Times times_{};      // of the running step
  int64_t busy_ = 0;
  int64_t window_ = -1;
  std::vector<Times> steps_;  // of the window
};

// Keeps the rank in `activity` while it lives.
class Lap {
 public:
  Lap(StepTiming& step_timing, Activity activity)
      : timing_(step_timing), before_(step_timing.reach(activity)) {}
  ~Lap() { timing_.reach(before_); }
  Lap(const Lap&) = delete;
  Lap& operator=(const Lap&) = delete;

 private:
  StepTiming& timing_;
  Activity before_;
};

}  // namespace fastsync::engine
