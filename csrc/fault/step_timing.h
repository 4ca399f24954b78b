// Splits the time of this rank's steps by activity, to find the rank that the others wait for.
//
// At every moment a rank is in one activity, so the times of a step add up to its length. A change
// costs one reading of the clock; a step has about six changes, and two per bucket.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
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

struct StepTimingRecord {
  int64_t rank = 0;
  Times times{};  // of a step
};

// The list for one window of steps.
struct StepTimingReport {
  int64_t steps = 0;                       // made by the end of the window
  std::vector<StepTimingRecord> earliest;  // the ranks that wait least, in that order
};

// Spreads the ranks' step timing: how long each waited for the others, window by window.
//
// The rank that waits least is the one that the others wait for. So each rank needs a short list:
// the few ranks that wait least. Such lists merge in any order and any number of times. They travel
// in the heartbeats of the fault watch, from neighbour to neighbour, together with the set of the
// ranks that they were taken from: once the set holds all ranks, the list is the same everywhere.
class StepTimingBoard {
 public:
  StepTimingBoard(int64_t rank, int64_t ranks) : rank_(rank), ranks_(ranks) {}

  // Adds this rank's means over the window that ended after `steps` steps.
  void post(int64_t steps, const Times& times);
  // Encode the windows that neighbours may lack, and merge those of a neighbour. Both run on the
  // watch's thread.
  std::string encode();
  void merge(const std::string& bytes);

  // Returns the report of the latest window that covers every rank.
  std::optional<StepTimingReport> latest() const;
  // Whether such a report has appeared since the last call.
  bool take_change();

 private:
  struct Window {
    std::vector<int64_t> told;  // bits, by rank: the ranks that the list covers
    bool complete = false;
    int heartbeats = 0;  // since the window is complete
    std::vector<StepTimingRecord> earliest;
  };

  void add(int64_t steps, const std::vector<int64_t>& told, bool complete,
           const std::vector<StepTimingRecord>& records);

  int64_t rank_;
  int64_t ranks_;
  mutable std::mutex mutex_;
  std::map<int64_t, Window> windows_;  // the latest, by the steps at their end
  int64_t asked_ = 0;
};

}  // namespace fastsync::engine
