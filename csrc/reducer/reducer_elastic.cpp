// Finishes a step in which ranks have died, on the surviving ranks.
//
// [Note: a step is committed]
// A rank applies the averages of a step, or exposes them, only after a vote: an all-reduce of one
// number, which a rank starts when all its buckets have arrived. The vote completes on a rank only
// if all ranks have started it. So if any rank has finished a step, all ranks have all its
// averages, however far they were when one died.
//
// Until then each rank keeps its own gradients. A rank that waits in vain, and knows that others
// have died, meets the survivors (in Python, through the rendezvous store). Consider the survivors
// that have not finished the oldest unfinished step. If each of them has all its averages, they
// take these: another rank, even a dead one, may have taken them already. Otherwise no rank can
// have, and the survivors average the step again from their own gradients: by a plan for their
// number, over a group of their own.
//
// [Note: residuals after a death]
// Error feedback follows the step: if a step is averaged again, a rank's residual is the one from
// before the step; if its averages are taken, the one that the step has produced (see
// [Note: repeatable steps]). A rank's residual is its own part of what the averages lack, the sums
// of its chunks included. So it stays with the rank when chunks go to other owners, in units of the
// averages, which do not depend on the number of ranks. The residuals of dead ranks are lost with
// their gradients.
//
// [Note: where the survivors are]
// The survivors have finished the same number of steps, or are one apart: a rank that is ahead
// waits in the next step, or in the planning between the two. A rank that is behind takes the
// averages and counts the step before the reducers are rebuilt. So all rebuild after the same step,
// and agree on the plan then. A plan that was due is thereby made.
//
// [Note: steps on devices]
// Averages exist once kernels have ended, so a step is committed no earlier. With `elastic` the
// host waits for that at the end of each backward, where otherwise only streams would, and watches
// for deaths meanwhile: it cannot launch the optimizer's kernels before. The vote follows as an
// all-reduce of Gloo, between hosts. The gradients that a rank keeps lie on its device.
//
// [Note: when a communicator is aborted]
// A NCCL kernel waits for the data of a dead rank until its communicator is aborted. Then it runs
// to its end without data, and still signals its neighbours that theirs has arrived: there a
// collective may succeed with garbage. So no rank aborts before the survivors have decided. Their
// statements about their averages were true then, and all that an abort ends is averaged again. The
// thread that ends the backward aborts, in rebuild(): it has not let a stream wait for anything
// that has not ended. For the same reason an error is thrown without the work's own wait(), which
// aborts; torch's watchdog must not abort; and a process that dies by an exception does not destroy
// its groups.
#include <ATen/core/grad_mode.h>

#include <utility>

#include "check.h"
#include "reducer/reducer.h"

namespace fastsync::engine {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;
using UniqueLock = std::unique_lock<std::recursive_mutex>;

// Releases the lock while Python meets or plans: other Python threads may query the reducer.
class Unlocked {
 public:
  explicit Unlocked(UniqueLock& lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() { lock_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  UniqueLock& lock_;
};

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "";
  }
}

}  // namespace

void Reducer::survive(Survivors survivors) {
  const Lock lock(mutex_);
  survival_ = std::make_unique<Survival>(params_);
  survival_->survivors = std::move(survivors);
  routes_.group->let_host_wait(survival_->survivors.timeout);
}

// Before the bucket is packed.
void Reducer::keep(const Bucket& bucket) {
  bucket.wait_for_producers();
  for (size_t i = 0; i < bucket.slots().size(); ++i) {
    const Slot& slot = bucket.slots()[i];
    if (!slot.early) survival_->own.keep(slot.index, bucket.transport().lives_here(i));
  }
}

// Whether the gradient may be packed ahead of its bucket. A gradient that lives in the bucket is
// copied with the others.
bool Reducer::may_take_early(const Bucket& bucket, size_t slot) {
  if (!survival_) return true;
  if (is_broken() || bucket.transport().lives_here(slot)) return false;
  survival_->own.keep(bucket.slots()[slot].index, false);
  return true;
}

// After an error the step goes on without sending; its end handles the error.
void Reducer::send(Bucket& bucket) {
  if (!survival_) return launch(bucket);
  try {
    keep(bucket);
    launch(bucket);
  } catch (...) {
    survival_->fault = std::current_exception();
  }
}

bool Reducer::is_broken() const { return survival_ && survival_->fault; }

// Under `lock`. Returns once this rank may use the averages of the running step. True: they contain
// gradients of ranks that are gone, and the survivors have yet to rebuild.
bool Reducer::agree_on_averages(UniqueLock& lock) {
  survival_->own.note_used();
  while (true) {
    try {
      if (is_broken()) std::rethrow_exception(survival_->fault);
      receive_all();
      vote();
      return false;
    } catch (...) {
      survival_->fault = std::current_exception();
    }
    const bool takes = meet(lock);
    survival_->vote.end();
    survival_->fault = nullptr;
    survival_->complete = false;
    if (takes) return true;
    average_again(lock);
  }
}

void Reducer::receive_all() {
  if (!communicates()) return;
  const auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < plan_.buckets.size(); ++i) {
    if (plan_.buckets[i].state() != BucketState::kInFlight) continue;
    await(i);
    try {
      plan_.buckets[i].receive();
    } catch (const std::exception& error) {
      fail(i, "receiving", error.what());
    }
  }
  stats_.exposed_seconds +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void Reducer::vote() {
  if (!communicates() || plan_.buckets.empty()) return;
  survival_->complete = true;
  const auto& group = routes_.memory ? routes_.memory : routes_.group;
  survival_->vote.start(*group);
  log_.progress()->issue();
  log_.progress()->reach(Phase::kWaiting);
  ExpectedCollective expected;
  expected.model = watched_as_;
  expected.issued = log_.progress()->issued();
  expected.label = concat("the vote that ends step ", stats_.steps + 1);
  waits_since_ = FaultWatch::Clock::now();
  comm::InFlight& voting = survival_->vote.in_flight();
  try {
    const Lap lap = log_.waiting();
    if (faults_ && voting.can_be_asked() && !voting.is_done_within({})) {
      faults_->wait(expected,
                    [&](std::chrono::milliseconds time) { return voting.is_done_within(time); });
    }
    voting.wait();
  } catch (const std::exception& error) {
    if (faults_) faults_->explain(expected, error.what(), waited());
    throw;
  }
  survival_->vote.end();
}

// Whether the survivors take the averages that they have. Rethrows the error if no rank has died.
bool Reducer::meet(UniqueLock& lock) {
  const std::exception_ptr fault = survival_->fault;
  if (!faults_ || faults_->is_interrupted()) std::rethrow_exception(fault);
  const auto meet = survival_->survivors.meet;
  const int64_t steps = this->steps();
  const bool complete = survival_->complete;
  log_.progress()->reach(Phase::kPlanning);
  int64_t verdict = 0;
  {
    const Unlocked unlocked(lock);
    verdict = meet(steps, complete, text_of(fault));
  }
  if (static_cast<Verdict>(verdict) == Verdict::kFails) std::rethrow_exception(fault);
  return static_cast<Verdict>(verdict) == Verdict::kTake;
}

void Reducer::average_again(UniqueLock& lock) {
  abandon();  // collectives may still write to abandoned buffers
  survival_->own.restore_gradients();
  rebuild(lock);
  survival_->own.restore_used();
  backward_running_ = true;
  counts_.clear();
  for (Bucket& bucket : plan_.buckets) bucket.transport().begin();
  close_buckets();
}

void Reducer::rebuild(UniqueLock& lock) {
  const auto rebuild = survival_->survivors.rebuild;
  {
    const Unlocked unlocked(lock);
    rebuild();
  }
  log_.restart_timing();
}

// At the end of a step.
void Reducer::forget_own() {
  if (!survival_) return;
  survival_->own.drop();
  survival_->fault = nullptr;
  survival_->complete = false;
}

// A single rank sends nothing, and its buckets scale nothing.
void Reducer::scale_alone() {
  if (communicates()) return;
  weigh();
  if (!survival_ && !weighed_ && groups_.empty()) return;
  const at::NoGradGuard no_grad;
  for (const Bucket& bucket : plan_.buckets) {
    const ops::Scale scale = packing(bucket.group()).scale;
    if (scale.is_one()) continue;
    for (const Slot& slot : bucket.slots()) {
      const at::Tensor& grad = slot.grad();
      if (!slot.param->used || !grad.defined()) continue;
      if (scale.tensor.defined()) {
        grad.mul_(scale.tensor);
      } else {
        grad.mul_(scale.value);
      }
    }
  }
}

}  // namespace fastsync::engine
