#include "reducer/plan_watch.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <iterator>
#include <unordered_set>
#include <utility>

#include "ops/ops.h"

namespace fastsync::engine {
namespace {

constexpr int64_t kLongestBackoff = 4096;
constexpr int64_t kDeviceSteps = 6;  // that a host runs ahead of its device, accumulation included
constexpr int kOutOfOrderSteps = 2;  // one may be an accident of scheduling

}  // namespace

void PlanWatch::plan_installed() {
  learned_ = steps_ > 0;
  steps_since_plan_ = 0;
  out_of_order_steps_ = 0;
  vote_ = false;
  votes_ = {};
}

void PlanWatch::plan_restored() {
  out_of_order_steps_ = 0;
  vote_ = false;
  votes_ = {};
}

void PlanWatch::group_changed() {
  learned_ = false;
  votes_ = {};
}

void PlanWatch::begin_step() {
  order_.clear();
  out_of_order_ = false;
}

void PlanWatch::end_step(const std::vector<int64_t>& missing) {
  last_order_ = order_;
  // A function's backward may have returned no gradient for what is missing: it has arrived all the
  // same.
  std::unordered_set<int64_t> seen(order_.begin(), order_.end());
  std::copy_if(missing.begin(), missing.end(), std::back_inserter(last_order_),
               [&](int64_t param) { return seen.insert(param).second; });
  out_of_order_steps_ = out_of_order_ ? out_of_order_steps_ + 1 : 0;
  vote_ = learned_ && out_of_order_steps_ >= kOutOfOrderSteps && steps_since_plan_ >= backoff_;
  end_shadow_step();
}

void PlanWatch::end_shadow_step() {
  ++steps_since_plan_;
  ++steps_;
}

void PlanWatch::wish() { vote_ = vote_ || steps_since_plan_ >= backoff_ / 2; }

void PlanWatch::note_votes(const at::Tensor& sum) {
  Votes& votes = votes_[static_cast<size_t>(steps_) % votes_.size()];
  votes = Votes{};
  if (!sum.defined()) return;
  read_after_ = sum.is_cpu() ? 1 : kDeviceSteps;
  if (sum.is_cpu()) {
    votes.passed = ops::first_element(sum) > 0;
    return;
  }
  votes.host = ops::make_pinned_scalar(sum.scalar_type());
  votes.host.copy_(sum, /*non_blocking=*/true);
  votes.copied.emplace(sum.device().type());
  votes.copied->record(c10::impl::VirtualGuardImpl(sum.device().type()).getStream(sum.device()));
}

bool PlanWatch::replan_due() {
  if (!learned_ && steps_ > 0) return true;
  const int64_t step = steps_ - 1 - read_after_;
  if (step < 0) return false;
  Votes& votes = votes_[static_cast<size_t>(step) % votes_.size()];
  if (votes.copied) {  // as a rule the copy has long arrived
    votes.copied->synchronize();
    votes.passed = ops::first_element(votes.host) > 0;
  }
  const bool passed = std::exchange(votes, Votes{}).passed;
  if (passed) backoff_ = std::min(backoff_ * 2, kLongestBackoff);
  return passed;
}

}  // namespace fastsync::engine
