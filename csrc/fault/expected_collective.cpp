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

bool is_busy(const Standing& at) { return static_cast<Phase>(at.phase) != Phase::kBetweenSteps; }

}  // namespace

bool is_counted(const Wanted& wanted) {
  return (wanted.bucket >= 0 || wanted.issued > 0) && wanted.issued != kUncounted;
}

bool wants(const Wanted& wanted, int64_t rank) {
  const auto& ranks = wanted.ranks;
  return ranks.empty() || std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

bool lacks(const News& news, const Wanted& wanted) {
  return wanted.model >= news.standings.size() ||
         news.standings[wanted.model].issued < wanted.issued;
}

bool codes_long(const News& news, const Wanted& wanted) {
  return wanted.model < news.standings.size() && codes_long(news.standings[wanted.model]);
}

// A rank that is expected in a place of Python wraps a model, or is in a step of one.
const Standing* standing_of(const News& news, size_t& model) {
  const std::vector<Standing>& all = news.standings;
  if (model >= all.size()) return nullptr;
  if (model != kPlaces || is_busy(all[kPlaces])) return &all[model];
  const auto busy = std::find_if(all.rbegin(), all.rend(), is_busy);
  const auto found = busy == all.rend() ? all.rbegin() : busy;
  model = static_cast<size_t>(all.rend() - found) - 1;
  return &all[model];
}

bool waits(const News& news, const Wanted& wanted) {
  const std::vector<Standing>& all = news.standings;
  if (!all.empty() && waits_in(all[kPlaces].phase)) return true;
  size_t model = wanted.model;
  const Standing* at = standing_of(news, model);
  return at != nullptr && waits_in(at->phase);
}

}  // namespace fastsync::engine
