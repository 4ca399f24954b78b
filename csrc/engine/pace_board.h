// Where the ranks learn of each other's pace: what each waited for the others, window by window.
//
// The rank that waits least is the one that the others wait for. So what all have to know is who
// waits least, and who comes after: the few ranks that wait least. Such lists merge in any order
// and any number of times. They travel in the beats of the fault watch, from neighbour to
// neighbour, together with the set of the ranks that they were taken from: once it holds all ranks,
// the list is the same everywhere.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "pace.h"

namespace fastsync::engine {

struct PaceRecord {
  int64_t rank = 0;
  Times times{};  // of a step
};

// Of a window of steps.
struct PaceReport {
  int64_t steps = 0;                 // that had been made at its end
  std::vector<PaceRecord> earliest;  // those that wait least first
};

class PaceBoard {
 public:
  PaceBoard(int64_t rank, int64_t ranks) : rank_(rank), ranks_(ranks) {}

  // This rank's means over the window that ended after so many steps.
  void post(int64_t steps, const Times& times);
  // What neighbours may lack, and what they have told. On the watch's thread.
  std::string encode();
  void merge(const std::string& bytes);

  // Of the latest window that every rank has told of.
  std::optional<PaceReport> latest() const;
  // Whether there is one that nobody has asked for so.
  bool take_news();

 private:
  struct Window {
    std::vector<int64_t> told;  // bits, by rank
    bool complete = false;
    int beats = 0;  // since then
    std::vector<PaceRecord> earliest;
  };

  void add(int64_t steps, const std::vector<int64_t>& told, bool complete,
           const std::vector<PaceRecord>& records);

  int64_t rank_;
  int64_t ranks_;
  mutable std::mutex mutex_;
  std::map<int64_t, Window> windows_;  // the latest, by the steps at their end
  int64_t asked_ = 0;
};

}  // namespace fastsync::engine
