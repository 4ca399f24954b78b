// State that lets a rank finish a step in which other ranks have died.
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
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "reducer/bucket.h"
#include "reducer/flags.h"

namespace fastsync::engine {

// This rank's own gradients of the running step, as they are before a bucket scales, sums or
// replaces them.
class OwnGradients {
 public:
  // `params` must stay valid as long as this object.
  explicit OwnGradients(const Parameters& params) : params_(params), grads_(params.size()) {}

  // Keeps the gradient before a bucket takes it. A gradient that lives in the bucket is copied. Any
  // other is kept as it is: autograd made it, and it would be freed once it is packed.
  void keep(size_t param, bool in_bucket);
  // Notes the used parameters, at the end of the backward.
  void note_used();
  // Restore gradients and used flags to their state before any bucket took them.
  void restore_gradients() const;
  void restore_used() const;
  void drop();

 private:
  const Parameters& params_;
  std::vector<at::Tensor> grads_;  // by parameter; undefined: no bucket has taken it
  std::vector<bool> used_;
};

// The survivors' decision about the running step.
enum class Verdict : int64_t {
  kFails,  // no rank has died: the error stands
  kTake,   // all survivors have all its averages, and take them
  kAgain,  // the survivors alone average it again
};

struct Survivors {
  // Returns the verdict once all survivors have met. Called with the number of steps that this rank
  // has finished, whether it has all averages of the next one, and its error.
  std::function<int64_t(int64_t steps, bool complete, const std::string& error)> meet;
  // Makes the reducer average over the survivors from now on.
  std::function<void()> rebuild;
  std::chrono::milliseconds timeout;  // for a collective of a device
};

struct Survival {
  explicit Survival(const Parameters& params) : own(params) {}

  Survivors survivors;
  OwnGradients own;
  // Of one flag, which each rank starts once it has all averages of a step. It runs on the host,
  // which waits for it.
  std::unique_ptr<FlagExchange> vote;
  std::exception_ptr fault;  // of the running step, in which nothing more is sent
  bool complete = false;     // this rank has all averages of the running step
};

}  // namespace fastsync::engine
