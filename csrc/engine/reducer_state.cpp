// What others may ask a reducer, and what coding carries from step to step, which they may take and give.
//
// [Note: parked residuals]
// A residual is what averages still lack, and must not be lost while its parameter is frozen, or lies in a bucket that has no
// error feedback (a warm-up, a small bucket, a single rank). It is then parked here until a bucket takes it, or the user turns
// error feedback off. Factors are parked alike, until a bucket takes them or the wire has no use for them.
#include "../check.h"
#include "reducer.h"

namespace fastsync::engine {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

// Not a view that keeps a whole bucket's memory.
at::Tensor own(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.storage().nbytes() == tensor.nbytes()) return tensor;
  return ops::copy_of(tensor);
}

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
  ReducerStats stats = stats_;
  for (const Bucket& bucket : buckets_) stats.residual_bytes += bucket.residual_bytes();
  for (const at::Tensor& parked : parked_.residuals) {
    if (parked.defined()) stats.residual_bytes += static_cast<int64_t>(parked.nbytes());
  }
  return stats;
}

Carried Reducer::carried_views() const {
  Carried views = parked_;
  for (const Bucket& bucket : buckets_) bucket.read_carried(views);
  return views;
}

Carried Reducer::carried() const {
  const Lock lock(mutex_);
  Carried copies = carried_views();
  for (std::vector<at::Tensor>* tensors : {&copies.residuals, &copies.factors}) {
    for (at::Tensor& copy : *tensors) {
      if (copy.defined()) copy = ops::copy_of(copy);
    }
  }
  return copies;
}

void Reducer::load_carried(const Carried& carried) {
  const Lock lock(mutex_);
  FS_CHECK(!backward_running_, "cannot load what coding carries during a backward");
  FS_CHECK_VALUE(
      carried.residuals.size() == params_.size() && carried.factors.size() == params_.size(),
      "expects one residual and one factor per parameter");
  Carried parked(params_.size());
  for (size_t i = 0; i < params_.size(); ++i) {
    const Place& place = places_[i];
    const Bucket* bucket =
        place.bucket < 0 ? nullptr : &buckets_[static_cast<size_t>(place.bucket)];
    const bool feeds_back = bucket != nullptr && bucket->has_residual();
    const bool learns = bucket != nullptr && bucket->has_factor(place.slot);
    if (!feeds_back) parked.residuals[i] = own(carried.residuals[i]);
    if (!learns) parked.factors[i] = own(carried.factors[i]);
  }
  for (Bucket& bucket : buckets_) bucket.load_carried(carried);
  parked_ = std::move(parked);
}

void Reducer::drop_parked(const std::vector<int64_t>& residuals,
                          const std::vector<int64_t>& factors) {
  const Lock lock(mutex_);
  for (const int64_t param : residuals) parked_.residuals.at(static_cast<size_t>(param)).reset();
  for (const int64_t param : factors) parked_.factors.at(static_cast<size_t>(param)).reset();
}

void Reducer::check_capture() const {
  FS_CHECK(watch_.knows_order(),
           "a step cannot be captured before the buckets are planned: train a few steps first");
  for (size_t i = 0; i < params_.size(); ++i) {
    FS_CHECK(planned_[i] || !params_[i]->tensor.requires_grad(), "parameter '", params_[i]->name,
             "' was unfrozen just before a step is captured; train a few steps in between");
  }
}

void Reducer::set_divisor(double divisor) {
  const Lock lock(mutex_);
  FS_CHECK_VALUE(divisor > 0, "gradients cannot be divided by ", divisor);
  divisor_ = divisor;
}

void Reducer::resume(int64_t steps) {
  const Lock lock(mutex_);
  FS_CHECK(!backward_running_, "cannot resume a training during a backward");
  FS_CHECK_VALUE(steps >= 0, "a training cannot have ", steps, " steps");
  earlier_steps_ = steps - stats_.steps;
}

void Reducer::use_chains(const std::vector<std::string>& group_names) {
  const Lock lock(mutex_);
  std::vector<std::shared_ptr<comm::Collective>> groups;
  for (const std::string& name : group_names) groups.push_back(comm::Collective::resolve(name));
  chains_ = std::make_unique<comm::Chains>(std::move(groups));
}

}  // namespace fastsync::engine
