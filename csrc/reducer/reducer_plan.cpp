// Changes of a reducer's plan.
#include <utility>

#include "check.h"
#include "fault/watched_codec.h"
#include "reducer/reducer.h"

namespace fastsync::engine {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

// A plan that has been unused for so many steps is dropped with its buffers.
constexpr int64_t kKeptSteps = 32;

// Returns the same bucket; a codec of the user reports when it runs.
BucketSpec watched(BucketSpec spec, const std::shared_ptr<Progress>& progress) {
  if (spec.coded && spec.coded->codec) {
    spec.coded->codec = std::make_shared<WatchedCodec>(std::move(spec.coded->codec), progress);
  }
  return spec;
}

}  // namespace

void Reducer::set_plan(const std::vector<BucketSpec>& specs, int64_t until, bool keep) {
  const Lock lock(mutex_);
  leave_backward("change the plan");
  Plan plan;
  plan.places.resize(params_.size());
  for (size_t b = 0; b < specs.size(); ++b) {
    for (size_t s = 0; s < specs[b].slots.size(); ++s) {
      Place& place = plan.places.at(static_cast<size_t>(specs[b].slots[s].param));
      FS_CHECK_VALUE(place.bucket < 0, "the plan holds a parameter twice");
      place = Place{static_cast<int64_t>(b), s};
    }
    plan.buckets.emplace_back(watched(specs[b], log_.progress()), params_, routes(specs[b].group),
                              b, specs.size());
  }
  plan.until = until;
  plan.number = stats_.plans + 1;
  check_covers(plan);
  install(std::move(plan), keep);
  ++stats_.plans;
  watch_.plan_installed();
}

bool Reducer::restore_plan(int64_t number) {
  const Lock lock(mutex_);
  leave_backward("change the plan");
  const auto kept = kept_plans_.find(number);
  if (kept == kept_plans_.end()) return false;
  check_covers(kept->second);
  install(std::move(kept_plans_.extract(kept).mapped()), /*keep=*/true);
  watch_.plan_restored();
  return true;
}

bool Reducer::keeps_plan(int64_t number) const {
  const Lock lock(mutex_);
  return kept_plans_.count(number) > 0;
}

void Reducer::check_covers(const Plan& plan) const {
  for (size_t i = 0; i < params_.size(); ++i) {
    const bool planned = plan.places[i].bucket >= 0;
    FS_CHECK_VALUE(planned || !params_[i]->leaf.requires_grad(), "the plan lacks parameter '",
                   params_[i]->name, "'");
  }
}

// Installs a plan that has passed all checks.
void Reducer::install(Plan plan, bool keep) {
  const Residuals residuals = residual_views();
  counts_ = used_counts();  // the buckets that hold the counts go
  for (size_t i = 0; i < params_.size(); ++i) {
    const bool planned = plan.places[i].bucket >= 0;
    if (planned_[i] != planned) log_.forget_used();
    planned_[i] = planned;
  }
  std::swap(plan, plan_);
  if (keep) {
    plan.replaced = stats_.steps;
    kept_plans_.insert_or_assign(plan.number, std::move(plan));
  }
  load_residuals(residuals);
  hooks().update();
  log_.plan_installed(plan_.number);
  log_.progress()->plan(static_cast<int64_t>(plan_.buckets.size()));
}

void Reducer::forget_plans() {
  const Lock lock(mutex_);
  kept_plans_.clear();
}

// At the end of a step.
void Reducer::forget_unused_plans() {
  for (auto kept = kept_plans_.begin(); kept != kept_plans_.end();) {
    const bool unused = stats_.steps - kept->second.replaced >= kKeptSteps;
    kept = unused ? kept_plans_.erase(kept) : std::next(kept);
  }
}

void Reducer::on_plan_due(std::function<void()> fn) {
  const Lock lock(mutex_);
  plan_due_ = std::move(fn);
}

// Every rank calls this after the same steps. Not under the lock: Python plans, and other Python
// threads may query the reducer.
void Reducer::call_what_is_due() {
  bool compares = false;
  std::function<void()> make_plan;
  {
    const Lock lock(mutex_);
    if (captured_) return;
    compares = compared_every_ > 0 && steps() % compared_every_ == 0;
    const bool asked = watch_.replan_due();
    if (asked || (plan_.until >= 0 && steps() >= plan_.until)) make_plan = plan_due_;
  }
  // Compares before a new plan: by the plan that the gradients travelled with.
  if (compares) call(Phase::kComparing, [this] { compare(); });
  call(Phase::kPlanning, make_plan);
}

void Reducer::call(Phase phase, const std::function<void()>& fn) {
  if (!fn) return;
  if (precision_) precision_->end_forward();  // Python reads the stored parameters
  log_.progress()->reach(phase);
  fn();
  log_.restart_timing();
  log_.progress()->reach(Phase::kBetweenSteps);
}

}  // namespace fastsync::engine
