// Ends a failed step of a rank, and counts the contributors for the others. See
// [Note: skipped steps].
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "check.h"
#include "reducer/reducer.h"

namespace fastsync::engine {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace

void Reducer::on_skips(std::function<void(std::vector<int64_t>)> fn) {
  const Lock lock(mutex_);
  on_skips_ = std::move(fn);
}

void Reducer::note_optimizer() {
  const Lock lock(mutex_);
  stepped_ = true;
}

void Reducer::skip_step() {
  const at::NoGradGuard no_grad;
  int64_t generation = 0;
  {
    const Lock lock(mutex_);
    FS_CHECK(options_.may_skip, "this model does not skip steps");
    FS_CHECK(running_backward() < 0, "cannot skip a step inside a backward");
    if (faults_) faults_->check_agreement();
    forwards_.skipped();
    if (plan_.buckets.empty()) return;
    if (!backward_running_) open_step();
    withhold();
    generation = generation_;
  }
  close_backward(generation);
  finish_backward(generation);
}

// Drops the gradients that have not been sent.
void Reducer::withhold() {
  skipping_ = true;
  for (size_t i = next_; i < plan_.buckets.size(); ++i) {
    Bucket& bucket = plan_.buckets[i];
    bucket.abandon();
    bucket.transport().begin();
    for (const Slot& slot : bucket.slots()) {
      slot.param->used = false;
      slot.mutable_grad().reset();
    }
  }
  gives_.assign(next_, true);
}

void Reducer::start_contributors() {
  if (!contributors_) {
    const auto& group = routes_.memory ? routes_.memory : routes_.group;
    contributors_ = std::make_unique<FlagExchange>(group, /*own=*/false);
  }
  if (!skipping_) gives_.assign(plan_.buckets.size(), true);
  gives_.resize(plan_.buckets.size());
  gives_.push_back(std::exchange(stepped_, false));
  contributors_->start(gives_, plan_.buckets.front().device());
  log_.progress()->issue();
}

// Returns the number of contributors by parameter; empty if every rank has contributed to all.
std::vector<int64_t> Reducer::await_contributors() {
  if (!contributors_ || !contributors_->started()) return {};
  const auto label = concat("the count of the ranks that do not skip step ", stats_.steps + 1);
  contributors_->wait(
      [&](comm::InFlight& votes) { await_last_issued(votes, Phase::kWaiting, label); });
  std::vector<int64_t> by_bucket = contributors_->counts();
  const int64_t stepped = by_bucket.back();
  by_bucket.pop_back();
  const int64_t ranks = routes_.group->size();
  FS_CHECK(stepped == 0 || stepped == ranks, "only ", stepped, " of ", ranks,
           " ranks have called optimizer.step() after step ", stats_.steps, ", rank ",
           routes_.group->rank(), gives_.back() ? " among them" : " not",
           ": their weights differ. After `with model.skipping(...)` every rank has to, whether "
           "it has skipped the step or not; restart from a checkpoint");
  const auto all = [ranks](int64_t count) { return count == ranks; };
  if (std::all_of(by_bucket.begin(), by_bucket.end(), all)) return {};
  std::vector<int64_t> counts(params_.size(), -1);
  for (size_t b = 0; b < plan_.buckets.size(); ++b) {
    for (const Slot& slot : plan_.buckets[b].slots()) counts[slot.index] = by_bucket[b];
  }
  return counts;
}

}  // namespace fastsync::engine
