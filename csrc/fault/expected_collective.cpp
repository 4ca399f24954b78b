#include "fault/expected_collective.h"

#include <algorithm>

namespace fastsync::engine {
namespace {

// kPlanning and kComparing do not count: there a rank is on its way to a place of Python, or waits
// in it.
bool waits_in(int64_t phase) {
  switch (static_cast<Phase>(phase)) {
    case Phase::kWaiting:
    case Phase::kGathering:
    case Phase::kGatheringUnit:
    case Phase::kReducingUnit:
    case Phase::kTogether:
      return true;
    default:
      return false;
  }
}

bool is_busy(const ProgressSnapshot& at) {
  return static_cast<Phase>(at.phase) != Phase::kBetweenSteps;
}

}  // namespace

bool is_counted(const ExpectedCollective& expected) {
  return (expected.bucket >= 0 || expected.issued > 0) && expected.issued != kUncounted;
}

bool expects(const ExpectedCollective& expected, int64_t rank) {
  const auto& ranks = expected.ranks;
  return ranks.empty() || std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

bool lacks(const FaultEvent& event, const ExpectedCollective& expected) {
  return expected.model >= event.progress.size() ||
         event.progress[expected.model].issued < expected.issued;
}

bool codes_long(const FaultEvent& event, const ExpectedCollective& expected) {
  return expected.model < event.progress.size() && codes_long(event.progress[expected.model]);
}

// A rank that is expected in a place of Python wraps a model, or is in a step of one.
const ProgressSnapshot* progress_of(const FaultEvent& event, size_t& model) {
  const std::vector<ProgressSnapshot>& all = event.progress;
  if (model >= all.size()) return nullptr;
  if (model != kWaitScopes || is_busy(all[kWaitScopes])) return &all[model];
  const auto busy = std::find_if(all.rbegin(), all.rend(), is_busy);
  const auto found = busy == all.rend() ? all.rbegin() : busy;
  model = static_cast<size_t>(all.rend() - found) - 1;
  return &all[model];
}

bool waits(const FaultEvent& event, const ExpectedCollective& expected) {
  const std::vector<ProgressSnapshot>& all = event.progress;
  if (!all.empty() && waits_in(all[kWaitScopes].phase)) return true;
  size_t model = expected.model;
  const ProgressSnapshot* at = progress_of(event, model);
  return at != nullptr && waits_in(at->phase);
}

}  // namespace fastsync::engine
