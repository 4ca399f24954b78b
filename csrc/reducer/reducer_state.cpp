// State of a reducer that is read or set between steps: its counters, the residuals of parameters,
// its routes between ranks.
//
// [Note: parked residuals]
// A residual is the part that the averages still lack. It must not be lost while its parameter is
// frozen, or lies in a bucket without error feedback (a warm-up, a small bucket, a single rank). It
// is then parked here until a bucket takes it, or until the user turns error feedback off.
#include <utility>

#include "check.h"
#include "ops/buffers.h"
#include "ops/ops.h"
#include "reducer/reducer.h"
#include "transport/pipelined.h"

namespace fastsync::engine {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

// Copies a view that would keep a whole bucket's memory.
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
  for (const auto& param : params_) flags.push_back(param->leaf.requires_grad());
  return flags;
}

StepReport Reducer::last_step() const {
  const Lock lock(mutex_);
  return log_.report();
}

std::vector<int64_t> Reducer::used_counts() const {
  const Lock lock(mutex_);
  if (!counts_.empty()) return counts_;
  std::vector<int64_t> counts = flags_ ? flags_->counts() : std::vector<int64_t>();
  if (!counts.empty()) return counts;
  counts.assign(log_.used().begin(), log_.used().end());
  if (!communicates() || !votes() || counts.empty()) return counts;
  const std::vector<bool>& used = log_.used();
  for (const Bucket& bucket : plan_.buckets) {
    // A bucket that was left out still has the flags of an earlier step.
    if (!idle(bucket, [&](size_t i) { return used[i]; })) bucket.count_uses(counts);
  }
  return counts;
}

std::vector<std::pair<int64_t, bool>> Reducer::nonfinite() const {
  const Lock lock(mutex_);
  read_flags();
  std::vector<std::pair<int64_t, bool>> found;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!params_[i]->nonfinite) continue;
    found.emplace_back(static_cast<int64_t>(i), params_[i]->nonfinite_here);
  }
  return found;
}

ReducerStats Reducer::stats() const {
  const Lock lock(mutex_);
  ReducerStats stats = stats_;
  for (const Bucket& bucket : plan_.buckets) {
    stats.residual_bytes += bucket.transport().residual_bytes();
  }
  for (const at::Tensor& residual : parked_) {
    if (residual.defined()) stats.residual_bytes += static_cast<int64_t>(residual.nbytes());
  }
  return stats;
}

Residuals Reducer::residual_views() const {
  Residuals views = parked_;
  views.resize(params_.size());
  for (const Bucket& bucket : plan_.buckets) bucket.transport().read(views);
  return views;
}

Residuals Reducer::residuals() const {
  const Lock lock(mutex_);
  Residuals copies = residual_views();
  for (at::Tensor& copy : copies) {
    if (copy.defined()) copy = ops::copy_of(copy);
  }
  return copies;
}

void Reducer::load_residuals(const Residuals& residuals) {
  const Lock lock(mutex_);
  leave_backward("load what parameters carry");
  FS_CHECK_VALUE(residuals.size() == params_.size(), "expects one residual per parameter, but got ",
                 residuals.size(), " for ", params_.size());
  Residuals parked(params_.size());
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!holds_residual(plan_.places[i].bucket)) parked[i] = own(residuals[i]);
  }
  for (Bucket& bucket : plan_.buckets) bucket.transport().load(residuals);
  parked_ = std::move(parked);
}

bool Reducer::holds_residual(int64_t bucket) const {
  return bucket >= 0 && plan_.buckets[static_cast<size_t>(bucket)].transport().residual_bytes() > 0;
}

void Reducer::drop_parked(const std::vector<int64_t>& params) {
  const Lock lock(mutex_);
  if (parked_.empty()) return;
  for (const int64_t param : params) parked_.at(static_cast<size_t>(param)).reset();
}

void Reducer::check_capture() const {
  FS_CHECK(watch_.knows_order(),
           "a step cannot be captured before the buckets are planned: train a few steps first");
  FS_CHECK(!options_.check_finite,
           "a step that is captured into a CUDA graph cannot look at its gradients; use "
           "nonfinite='ignore'");
  for (size_t i = 0; i < params_.size(); ++i) {
    FS_CHECK(planned_[i] || !params_[i]->leaf.requires_grad(), "parameter '", params_[i]->name,
             "' was unfrozen just before a step is captured; train a few steps in between");
  }
}

void Reducer::set_divisor(double divisor) {
  const Lock lock(mutex_);
  FS_CHECK_VALUE(divisor > 0, "gradients cannot be divided by ", divisor);
  divisors_.front() = divisor;
}

void Reducer::add_group(const std::string& group_name, double divisor) {
  const Lock lock(mutex_);
  FS_CHECK_VALUE(divisor > 0, "gradients cannot be divided by ", divisor);
  groups_.push_back({comm::Collective::resolve(group_name), nullptr, nullptr, nullptr, nullptr});
  divisors_.push_back(divisor);
  watch_over(groups_.back().group);
}

void Reducer::use_weights(Weighing weighing) {
  const Lock lock(mutex_);
  weighing_ = std::move(weighing);
}

void Reducer::resume(int64_t steps) {
  const Lock lock(mutex_);
  leave_backward("resume a training");
  FS_CHECK_VALUE(steps >= 0, "a training cannot have ", steps, " steps");
  earlier_steps_ = steps - stats_.steps;
}

void Reducer::set_hook(std::unique_ptr<comm::Hook> hook, const std::string& flags_group) {
  const Lock lock(mutex_);
  leave_backward("change the communication hook");
  routes_.hook = std::move(hook);
  flags_.reset();
  if (!votes() || options_.static_graph) return;
  std::shared_ptr<comm::Collective> own = routes_.memory;  // no bucket under a hook uses it
  if (!own && !flags_group.empty()) {
    own = comm::Collective::resolve(flags_group);
    watch_over(own);
  }
  flags_ = std::make_unique<FlagExchange>(own ? own : routes_.group, own != nullptr);
}

void Reducer::detach_hooks() {
  const Lock lock(mutex_);
  hooks().detach();
}

void Reducer::at_end(std::function<void()> action) {
  const Lock lock(mutex_);
  at_end_.push_back(std::move(action));
}

void Reducer::use_group(const std::string& group_name) {
  const Lock lock(mutex_);
  abandon();
  routes_.group = comm::Collective::resolve(group_name);
  watch_over(routes_.group);
  contributors_.reset();
  alike_.reset();
  if (survival_) {
    survival_->vote.drop();
    routes_.group->let_host_wait(survival_->survivors.timeout);
  }
  routes_.memory = nullptr;
  log_.progress()->restart();
  divisors_.front() = routes_.group->size();
  usage_.set_rank(routes_.group->rank());
  watch_.group_changed();
}

void Reducer::use_shards(const std::string& group_name) {
  const Lock lock(mutex_);
  routes_.shards = comm::Collective::resolve(group_name);
  watch_over(routes_.shards);
}

void Reducer::use_memory(std::shared_ptr<comm::Collective> sums,
                         std::shared_ptr<comm::Collective> regions,
                         std::shared_ptr<ops::BufferPool> pool, size_t group) {
  const Lock lock(mutex_);
  Routes& used = routes(group);
  used.memory = std::move(sums);
  contributors_.reset();
  alike_.reset();
  used.shards = std::move(regions);
  used.pool = std::move(pool);
}

void Reducer::use_pipelines(std::vector<std::shared_ptr<comm::Collective>> stages, size_t group) {
  const Lock lock(mutex_);
  for (const auto& stage : stages) watch_over(stage);
  routes(group).pipelines = std::make_shared<comm::Pipelines>(std::move(stages));
}

void Reducer::shadow_step() {
  std::unique_lock<std::recursive_mutex> lock(mutex_);
  if (plan_.buckets.empty()) return;  // nothing is trained, so the others make no step either
  std::vector<Shadow> shadows;
  const std::vector<bool>& used = log_.used();
  for (size_t i = 0; i < plan_.buckets.size(); ++i) {
    if (idle(plan_.buckets[i], [&](size_t param) { return used.empty() || used[param]; })) continue;
    shadows.push_back(plan_.buckets[i].transport().shadow(packing().step));
  }
  for (const Shadow& shadow : shadows) {
    log_.progress()->issue();
    shadow.in_flight->wait();
  }
  if (flags_) {
    // This rank uses no parameter in the other ranks' step.
    flags_->start(std::vector<bool>(params_.size(), false), plan_.buckets.front().device());
    flags_->wait([this](comm::InFlight& flags) {
      flags.wait();
      follow_step();
    });
  }
  follow_step();
  watch_.note_votes(shadows.empty() ? at::Tensor() : shadows.back().vote());
  watch_.end_shadow_step();
  log_.count_steps(++stats_.steps);
  forget_unused_plans();
  lock.unlock();
  call_what_is_due();
}

std::optional<GradientSquares> Reducer::squares(const std::vector<at::Tensor>& params,
                                                const ShardedUnits& units) {
  const Lock lock(mutex_);
  squares_ = true;
  for (const auto& unit : units) unit->squares.want();
  std::vector<HeldGradients> held;
  for (const Bucket& bucket : plan_.buckets) {
    if (!bucket.transport().holds_gradients()) continue;
    HeldGradients& all = held.emplace_back(HeldGradients{{}, &bucket.transport()});
    for (const Slot& slot : bucket.slots()) all.gradients.push_back(slot.grad());
  }
  return known_squares(params, units, held);
}

int64_t Reducer::start_gather(const at::Tensor& flat) {
  const Lock lock(mutex_);
  check_agreement();
  const at::NoGradGuard no_grad;
  const int64_t ranks = routes_.group->size();
  if (ranks == 1) return 0;
  FS_CHECK(routes_.shards, "there is no process group for regions");
  while (gathers_.size() >= routes_.shards->at_a_time(flat.device())) {
    await_region(*gathers_.front());
    gathers_.pop_front();
  }
  const int64_t region = flat.numel() / ranks;
  const auto mine = ops::SlotLayout::run(routes_.group->rank() * region, region);
  const auto part = ops::view_of(flat, mine, flat.scalar_type());
  gathers_.push_back(routes_.shards->all_gather(flat, part));
  log_.progress()->issue_of_kind(/*evaluates=*/false, /*in_backward=*/false, /*about=*/0);
  const int64_t bytes = region * static_cast<int64_t>(flat.itemsize());
  ++stats_.collectives;
  stats_.bytes += ranks * bytes;
  stats_.sent_bytes += routes_.shards->leaving((ranks - 1) * bytes);
  return static_cast<int64_t>(gathers_.size());
}

void Reducer::finish_gathers() {
  const Lock lock(mutex_);
  for (const auto& gather : std::exchange(gathers_, {})) await_region(*gather);
}

}  // namespace fastsync::engine
