// What others may ask a reducer, and the state of error feedback that they may take and give.
#include "../check.h"
#include "reducer.h"

namespace fastsync::engine {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace

std::vector<int64_t> Reducer::ready_order() const {
  const Lock lock(mutex_);
  return watch_.ready_order();
}

std::vector<bool> Reducer::trainable() const {
  std::vector<bool> flags;
  flags.reserve(params_.size());
  for (const auto& param : params_) flags.push_back(param->tensor.requires_grad());
  return flags;
}

StepReport Reducer::last_step() const {
  const Lock lock(mutex_);
  return log_.report();
}

std::vector<int64_t> Reducer::used_counts() const {
  const Lock lock(mutex_);
  if (hook_ && !hook_counts_.empty()) return hook_counts_;
  std::vector<int64_t> counts(log_.used().begin(), log_.used().end());
  if (hook_ || !communicates() || !votes() || counts.empty()) return counts;
  for (const Bucket& bucket : buckets_) bucket.count_uses(counts);
  return counts;
}

ReducerStats Reducer::stats() const {
  const Lock lock(mutex_);
  return stats_;
}

std::vector<at::Tensor> Reducer::residual_views() const {
  std::vector<at::Tensor> views(params_.size());
  for (size_t i = 0; i < params_.size(); ++i) {
    const Place& place = places_.empty() ? Place{} : places_[i];
    if (place.bucket < 0) continue;
    views[i] = buckets_[static_cast<size_t>(place.bucket)].residual(place.slot);
  }
  return views;
}

std::vector<at::Tensor> Reducer::residuals() const {
  const Lock lock(mutex_);
  std::vector<at::Tensor> copies = residual_views();
  for (at::Tensor& copy : copies) {
    if (copy.defined()) copy = copy.clone();
  }
  return copies;
}

void Reducer::load_residuals(const std::vector<at::Tensor>& residuals) {
  const Lock lock(mutex_);
  FS_CHECK(!backward_running_, "cannot load residuals during a backward");
  FS_CHECK_VALUE(residuals.size() == params_.size(), "expects one residual per parameter");
  const std::vector<at::Tensor> views = residual_views();
  for (size_t i = 0; i < views.size(); ++i) {
    if (views[i].defined() && residuals[i].defined()) views[i].copy_(residuals[i]);
  }
}

}  // namespace fastsync::engine
