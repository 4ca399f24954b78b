// What the time of this rank's steps goes to, for whoever asks which rank the others wait for.
//
// At every moment a rank is at one activity, so the times of a step add up to its length. Changing
// it costs one reading of the clock; a step has about six changes and two per bucket.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace fastsync::engine {

enum class Activity : uint8_t {
  kBetweenSteps,  // data, the optimizer, backwards under no_sync(): whatever is none of the others
  kForward,       // and what follows it, up to the backward
  kBackward,
  kPacking,  // and handing buckets to the backend
  kWaiting,  // for averages, for rank 0's buffers, for parameters
};
constexpr size_t kActivities = 5;
using Times = std::array<int64_t, kActivities>;  // nanoseconds, by activity

class Pace {
 public:
  // Steps over which times are averaged. Windows begin after the same steps on every rank.
  static constexpr int64_t kWindow = 50;

  // From now on. Returns the activity before.
  Activity reach(Activity activity);
  // The time since the last change counts for nothing: the ranks have planned.
  void restart();
  // A step has ended, after so many. Returns the means of its window where it is the last one of
  // it.
  std::optional<Times> end_step(int64_t steps);

 private:
  Activity activity_ = Activity::kBetweenSteps;
  int64_t since_ = 0;  // steady clock; 0: nothing has begun
  Times times_{};      // of the running step
  int64_t window_ = -1;
  std::vector<Times> steps_;  // of the window
};

// While it lives, the rank is at `activity`.
class Lap {
 public:
  Lap(Pace& pace, Activity activity) : pace_(pace), before_(pace.reach(activity)) {}
  ~Lap() { pace_.reach(before_); }
  Lap(const Lap&) = delete;
  Lap& operator=(const Lap&) = delete;

 private:
  Pace& pace_;
  Activity before_;
};

}  // namespace fastsync::engine
