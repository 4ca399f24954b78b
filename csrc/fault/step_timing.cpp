#include "fault/step_timing.h"

#include <algorithm>
#include <chrono>
#include <numeric>

namespace fastsync::engine {
namespace {

// The longest steps of a window are left out: a step that wrote a checkpoint or collected garbage
// says nothing about the others. A step takes equally long on all ranks, so all leave out the same
// ones.
constexpr int64_t kOutliers = 2;

int64_t now() {
  const auto since_start = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since_start).count();
}

int64_t length(const Times& times) {
  return std::accumulate(times.begin(), times.end(), int64_t{0});
}

Times mean(std::vector<Times> steps) {
  const auto end = steps.end() - kOutliers;
  std::nth_element(steps.begin(), end, steps.end(),
                   [](const Times& a, const Times& b) { return length(a) < length(b); });
  Times result{};
  for (auto step = steps.begin(); step != end; ++step) {
    for (size_t i = 0; i < kActivities; ++i) result[i] += (*step)[i];
  }
  for (int64_t& time : result) time /= end - steps.begin();
  return result;
}

}  // namespace

Activity StepTiming::reach(Activity activity) {
  const int64_t time = now();
  if (since_ != 0) {
    times_[static_cast<size_t>(activity_)] += time - since_;
    if (activity_ != Activity::kWaiting) busy_ += time - since_;
  }
  since_ = time;
  const Activity before = activity_;
  activity_ = activity;
  return before;
}

void StepTiming::restart() {
  since_ = now();
  times_ = {};
}

std::optional<Times> StepTiming::end_step(int64_t steps) {
  reach(Activity::kBetweenSteps);
  const int64_t window = (steps - 1) / kWindow;
  if (window != window_) steps_.clear();
  window_ = window;
  steps_.push_back(times_);
  times_ = {};
  // No means if this rank had no inputs for some of the steps.
  if (steps % kWindow != 0 || steps_.size() != kWindow) return std::nullopt;
  return mean(steps_);
}

}  // namespace fastsync::engine
