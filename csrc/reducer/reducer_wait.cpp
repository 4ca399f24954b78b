// Waits of a reducer for other ranks, under the fault watch if there is one.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include <cmath>
#include <utility>

#include "check.h"
#include "ops/device.h"
#include "reducer/reducer.h"

namespace fastsync::engine {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

}  // namespace

void Reducer::use_watch(std::shared_ptr<FaultWatch> watch) {
  const Lock lock(mutex_);
  faults_ = std::move(watch);
  log_.use_board(board_ = nullptr);
  if (!faults_) return;
  std::vector<std::string> names;
  for (const auto& param : params_) names.push_back(param->name);
  // On devices the host does not wait for averages, so its times say nothing.
  const bool on_cpu = !params_.empty() && params_.front()->tensor.is_cpu();
  board_ = on_cpu ? std::make_shared<StepTimingBoard>(routes_.group->rank(), routes_.group->size())
                  : nullptr;
  log_.use_board(board_);
  watched_as_ = faults_->add(log_.progress(), std::move(names), board_);
  for (const auto& ranks : {routes_.group, routes_.shards}) watch_over(ranks);
  for (const Routes& group : groups_) watch_over(group.group);
}

// Lets a fault abort the collectives of these ranks on a device.
void Reducer::watch_over(const std::shared_ptr<comm::Collective>& ranks) {
  if (!faults_ || !ranks || params_.empty() || params_.front()->tensor.is_cpu()) return;
  faults_->add_communicator(ranks->communicator(params_.front()->tensor.device()));
}

// Lets the monitor follow the collective that `what` describes, for which the current stream waits
// and the host does not. With elastic training the host waits itself; a mark in a captured stream
// would say nothing.
void Reducer::follow(std::function<ExpectedCollective()> what) {
  if (!faults_ || survival_ || captured_ || params_.empty()) return;
  const at::Device device = params_.front()->tensor.device();
  if (!device.is_cpu()) faults_->follow(ops::mark_stream(device), std::move(what));
}

// Follows all averages of the step.
void Reducer::follow_step() {
  const int64_t issued = log_.progress()->issued();
  follow([model = watched_as_, issued, step = stats_.steps + 1, buckets = plan_.buckets.size()] {
    ExpectedCollective expected;
    expected.model = model;
    expected.issued = issued;
    expected.label = concat("the averages of step ", step, " (", buckets, " buckets)");
    return expected;
  });
}

// With elastic training, errors of the watch are not final.
void Reducer::check_agreement() {
  if (faults_ && !survival_) faults_->check_agreement();
}

std::optional<StepTimingReport> Reducer::step_timing() const {
  const Lock lock(mutex_);
  return board_ ? board_->latest() : std::nullopt;
}

double Reducer::busy_seconds() const {
  const Lock lock(mutex_);
  return 1e-9 * static_cast<double>(log_.busy());
}

void Reducer::await_buffers(const std::function<void()>& exchange) {
  const Lap lap = log_.waiting();
  exchange();
}

ExpectedCollective Reducer::expected(size_t bucket) const {
  ExpectedCollective result;
  result.model = watched_as_;
  result.bucket = static_cast<int64_t>(bucket);
  result.issued = log_.progress()->issued_with(result.bucket + 1);
  result.label = concat("bucket ", bucket, " of ", plan_.buckets.size(), " (",
                        plan_.buckets[bucket].describe(), ") of step ", stats_.steps + 1);
  for (const Slot& slot : plan_.buckets[bucket].slots()) {
    result.parameters.push_back(slot.param->name);
  }
  return result;
}

void Reducer::finish_buckets() {
  check_agreement();
  if (!communicates()) {
    for (Bucket& bucket : plan_.buckets) {
      if (options_.check_finite) {
        bucket.check_finite();
        bucket.note_finite(/*travelled=*/false);
        keep_unread(bucket);
      }
      bucket.abandon();
    }
    return;
  }
  std::vector<bool> used;
  const auto start = std::chrono::steady_clock::now();
  if (flags_) {
    for (Bucket& bucket : plan_.buckets) {
      if (bucket.state() == BucketState::kInFlight) bucket.receive();
    }
    start_flags();  // if they had to wait for all hooks
    used = flags_->wait([this](comm::InFlight& flags) {
      flags.wait();
      follow_step();  // before the host waits for them
    });
  }
  if (!flags_) used = read_missed();
  const Bucket* last = nullptr;
  const Bucket* voted = nullptr;
  for (size_t i = 0; i < plan_.buckets.size(); ++i) {
    if (plan_.buckets[i].state() == BucketState::kReady) {
      plan_.buckets[i].abandon();  // idle
      continue;
    }
    const bool finished = plan_.buckets[i].state() == BucketState::kFilling;
    if (!finished) finish(i, used);
    last = &plan_.buckets[i];
    if (last->group() == 0) voted = last;
  }
  if (last) follow_step();
  stats_.exposed_seconds +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  watch_.note_votes(voted && !captured_ && votes() ? voted->transport().vote() : at::Tensor());
}

// On devices: returns which parameters any rank has used, if this rank lacks gradients; else
// nothing. The host waits once for all buckets.
std::vector<bool> Reducer::read_missed() {
  std::vector<const Bucket*> missed;
  std::vector<at::Tensor> sums;
  for (size_t i = 0; i < plan_.buckets.size() && !captured_; ++i) {
    Bucket& bucket = plan_.buckets[i];
    const bool waits = bucket.state() == BucketState::kInFlight && bucket.missed();
    if (!waits || bucket.device().is_cpu()) continue;
    await(i);
    try {
      bucket.receive();
    } catch (const std::exception& error) {
      fail(i, "receiving", error.what());
    }
    const at::Tensor flags = bucket.sums_of_flags();
    if (!flags.defined()) continue;
    missed.push_back(&bucket);
    sums.push_back(flags);
  }
  if (missed.empty()) return {};
  std::vector<bool> used;
  for (const auto& param : params_) used.push_back(param->used);
  const at::Tensor all = at::cat(sums).to(at::kCPU);
  const float* next = all.const_data_ptr<float>();
  for (const Bucket* bucket : missed) {
    for (const Slot& slot : bucket->slots()) used[slot.index] = *next++ > 0.0F || slot.param->used;
  }
  return used;
}

void Reducer::keep_unread(Bucket& bucket) {
  constexpr size_t kMostUnread = 4096;  // if the script never reads them
  auto unread = bucket.take_unread();
  if (!unread) return;
  if (unread_.size() >= kMostUnread) read_flags();
  unread_.push_back(std::move(*unread));
}

// See [Note: flags that stay on a device].
void Reducer::read_flags() const {
  if (unread_.empty()) return;
  std::vector<at::Tensor> flags;
  for (const UnreadFlags& each : unread_) flags.insert(flags.end(), {each.sums, each.own});
  const at::Tensor all = at::cat(flags).to(at::kCPU);
  const float* next = all.const_data_ptr<float>();
  for (const UnreadFlags& each : std::exchange(unread_, {})) {
    const size_t count = each.params.size();
    for (size_t i = 0; i < count; ++i) {
      if (next[i] == 0.0F) continue;  // the gradient stayed as it was
      Parameter& param = *each.params[i];
      param.nonfinite = !std::isfinite(next[i]) || (each.added[i] && param.nonfinite);
      param.nonfinite_here = !std::isfinite(next[count + i]);
    }
    next += 2 * count;
  }
}

// A rank that stops waiting, as in make_room(), and comes back has waited all the time.
void Reducer::begin_to_await(size_t index) {
  log_.progress()->await(static_cast<int64_t>(index));
  const std::pair<int64_t, size_t> which{stats_.steps, index};
  if (std::exchange(waited_for_, which) != which) waits_since_ = FaultWatch::Clock::now();
}

// Waits before a bucket is received. Returns at once if streams wait for it, not the host.
void Reducer::await(size_t index) {
  Bucket& bucket = plan_.buckets[index];
  if (bucket.state() != BucketState::kInFlight) return;
  begin_to_await(index);
  if (!faults_ || !bucket.can_be_asked()) return;
  if (arrives_within(index, {})) return;
  faults_->wait(expected(index),
                [&](std::chrono::milliseconds time) { return arrives_within(index, time); });
}

// Whether a bucket arrives within `timeout`; watches for faults meanwhile.
bool Reducer::comes_within(size_t index, std::chrono::milliseconds timeout) {
  if (!faults_ || !plan_.buckets[index].can_be_asked()) return arrives_within(index, timeout);
  begin_to_await(index);
  const auto start = FaultWatch::Clock::now();
  bool here = false;
  faults_->wait(expected(index), [&](std::chrono::milliseconds time) {
    here = arrives_within(index, time);
    return here || FaultWatch::Clock::now() - start >= timeout;
  });
  return here;
}

bool Reducer::arrives_within(size_t index, std::chrono::milliseconds time) {
  const Lap lap = log_.waiting();
  try {
    return plan_.buckets[index].arrives_within(time);
  } catch (const std::exception& error) {
    fail(index, "receiving", error.what());
  }
  return false;
}

// Returns the seconds of the current wait.
double Reducer::waited() const {
  const ProgressSnapshot at = log_.progress()->now();
  if (static_cast<Phase>(at.phase) < Phase::kWaiting) return 0;
  return std::chrono::duration<double>(FaultWatch::Clock::now() - waits_since_).count();
}

// Waits for regions of parameters that an optimizer has updated.
void Reducer::await_region(comm::InFlight& gather) {
  const auto label = concat("the gathering of parameters after step ", stats_.steps);
  await_last_issued(gather, Phase::kGathering, label);
  log_.progress()->reach(Phase::kBetweenSteps);
}

// Waits for the collective that was started last. `label`: its name in errors.
void Reducer::await_last_issued(comm::InFlight& work, Phase phase, const std::string& label) {
  log_.progress()->reach(phase);
  ExpectedCollective expected;
  expected.model = watched_as_;
  expected.issued = log_.progress()->issued();
  expected.label = label;
  waits_since_ = FaultWatch::Clock::now();
  const Lap lap = log_.waiting();
  const auto explained = [&](const auto& wait) {
    try {
      return wait();
    } catch (const std::exception& error) {
      if (faults_) faults_->explain(expected, error.what(), waited());
      throw;
    }
  };
  if (faults_ && work.can_be_asked()) {
    faults_->wait(expected, [&](std::chrono::milliseconds time) {
      return explained([&] { return work.is_done_within(time); });
    });
  }
  explained([&] { return work.wait(); });
  follow([expected] { return expected; });
}

void Reducer::fail(size_t bucket, const char* what, const std::string& error) {
  if (faults_ && communicates()) faults_->explain(expected(bucket), error, waited());
  throw std::runtime_error(concat("fastsync: rank ", routes_.group->rank(), ", ", what, " bucket ",
                                  bucket, " of ", plan_.buckets.size(), " (",
                                  plan_.buckets[bucket].describe(), "): ", error));
}

}  // namespace fastsync::engine
