// Spreads the ranks' step timing: how long each waited for the others, window by window.
//
// The rank that waits least is the one that the others wait for. So each rank needs a short list:
// the few ranks that wait least. Such lists merge in any order and any number of times. They travel
// in the heartbeats of the fault watch, from neighbour to neighbour, together with the set of the
// ranks that they were taken from: once the set holds all ranks, the list is the same everywhere.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "fault/step_timing.h"

namespace fastsync::engine {

struct StepTimingRecord {
  int64_t rank = 0;
  Times times{};  // of a step
};

// The list for one window of steps.
struct StepTimingReport {
  int64_t steps = 0;                       // made by the end of the window
  std::vector<StepTimingRecord> earliest;  // the ranks that wait least, in that order
};

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
