#include "fault/step_timing.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "comm/words.h"

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

// -- between ranks --

namespace {

using comm::put_word;
using comm::take_word;
using Lock = std::lock_guard<std::mutex>;

constexpr size_t kRecords = 9;  // one more than the ranks of a slow machine of eight
// Windows that are kept: a report may take longer to spread than a window of short steps.
constexpr size_t kWindows = 8;
constexpr int kLastHeartbeats = 20;  // that repeat a complete window
constexpr int64_t kWordBits = 64;

size_t words_for(int64_t ranks) { return static_cast<size_t>((ranks + kWordBits - 1) / kWordBits); }

int64_t count(const std::vector<int64_t>& bits) {
  int64_t all = 0;
  for (const int64_t word : bits) all += __builtin_popcountll(static_cast<uint64_t>(word));
  return all;
}

bool waits_less(const StepTimingRecord& a, const StepTimingRecord& b) {
  constexpr auto kWaits = static_cast<size_t>(Activity::kWaiting);
  return std::pair(a.times[kWaits], a.rank) < std::pair(b.times[kWaits], b.rank);
}

void merge_records(std::vector<StepTimingRecord>& into, const std::vector<StepTimingRecord>& from) {
  for (const StepTimingRecord& record : from) {
    const bool known = std::any_of(into.begin(), into.end(), [&](const StepTimingRecord& other) {
      return other.rank == record.rank;
    });
    if (!known) into.push_back(record);
  }
  std::sort(into.begin(), into.end(), waits_less);
  if (into.size() > kRecords) into.resize(kRecords);
}

}  // namespace

void StepTimingBoard::post(int64_t steps, const Times& times) {
  std::vector<int64_t> told(words_for(ranks_));
  told[static_cast<size_t>(rank_ / kWordBits)] |=
      static_cast<int64_t>(uint64_t{1} << static_cast<uint64_t>(rank_ % kWordBits));
  const Lock lock(mutex_);
  add(steps, told, /*complete=*/false, {{rank_, times}});
}

// Under the lock.
void StepTimingBoard::add(int64_t steps, const std::vector<int64_t>& told, bool complete,
                          const std::vector<StepTimingRecord>& records) {
  Window& window = windows_[steps];
  window.told.resize(words_for(ranks_));
  for (size_t i = 0; i < std::min(told.size(), window.told.size()); ++i) window.told[i] |= told[i];
  if (!window.complete) {
    merge_records(window.earliest, records);
    window.complete = complete || count(window.told) == ranks_;
  }
  while (windows_.size() > kWindows) windows_.erase(windows_.begin());
}

// Per window: the steps; the number of words of the set of ranks, and the words; the number of
// records, and the records. No words: the set holds all ranks.
std::string StepTimingBoard::encode() {
  const Lock lock(mutex_);
  std::string bytes;
  for (auto& [steps, window] : windows_) {
    if (window.complete && ++window.heartbeats > kLastHeartbeats) continue;
    put_word(bytes, steps);
    put_word(bytes, window.complete ? 0 : static_cast<int64_t>(window.told.size()));
    if (!window.complete) {
      for (const int64_t word : window.told) put_word(bytes, word);
    }
    put_word(bytes, static_cast<int64_t>(window.earliest.size()));
    for (const StepTimingRecord& record : window.earliest) {
      put_word(bytes, record.rank);
      for (const int64_t time : record.times) put_word(bytes, time);
    }
  }
  return bytes;
}

void StepTimingBoard::merge(const std::string& bytes) {
  const Lock lock(mutex_);
  size_t at = 0;
  while (at < bytes.size()) {
    const int64_t steps = take_word(bytes, at);
    const int64_t words = take_word(bytes, at);
    std::vector<int64_t> told;
    for (int64_t left = words; left > 0 && at < bytes.size(); --left) {
      told.push_back(take_word(bytes, at));
    }
    std::vector<StepTimingRecord> records;
    for (int64_t left = take_word(bytes, at); left > 0 && at < bytes.size(); --left) {
      StepTimingRecord& record = records.emplace_back();
      record.rank = take_word(bytes, at);
      for (int64_t& time : record.times) time = take_word(bytes, at);
    }
    add(steps, told, words == 0, records);
  }
}

std::optional<StepTimingReport> StepTimingBoard::latest() const {
  const Lock lock(mutex_);
  for (auto window = windows_.rbegin(); window != windows_.rend(); ++window) {
    if (window->second.complete) return StepTimingReport{window->first, window->second.earliest};
  }
  return std::nullopt;
}

bool StepTimingBoard::take_change() {
  const Lock lock(mutex_);
  for (auto window = windows_.rbegin(); window != windows_.rend(); ++window) {
    if (!window->second.complete) continue;
    return std::exchange(asked_, window->first) != window->first;
  }
  return false;
}

}  // namespace fastsync::engine
