// The transport of a bucket: its path from gradients to averages.
//
// Each bucket has one, chosen with its plan: all-reduce, sparse, hooked, or a pipeline of
// collectives that carries codes (coded, hierarchical). The bucket counts gradients and keeps the
// states; the transport has the buffers, and does not know the states. The calls of a step are
//
//   begin() ─▶ take()* ─▶ pack() ─▶ launch() ─▶ receive() ─▶ deliver()
//
// or abandon(), at any point.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../comm/hook.h"
#include "../comm/pipeline.h"
#include "../ops/ops.h"

namespace fastsync::engine {

// A model parameter. Addresses are stable for the reducer's life.
struct Parameter {
  at::Tensor tensor;
  std::string name;
  // Tensor that autograd accumulates into: of a DTensor, `tensor` is the local one, whose gradient
  // Python sets when one has been accumulated.
  at::Tensor leaf;
  bool used = false;        // a gradient arrived since the last synchronisation, or:
  bool part_alone = false;  // none did, but its gradient is this rank's part of an earlier mean
  // Set if the reducer checks for it: the average, and this rank's gradient, hold NaN or infinity.
  bool nonfinite = false;
  bool nonfinite_here = false;
  // Gradient accumulations in one backward; more than 1 is learned (reentrant checkpoints).
  int expected_accumulations = 1;
  // Mixed precision: the dtype that the parameter, and finally its gradient, is stored in; both
  // have another dtype in backward.
  std::optional<at::ScalarType> stored = std::nullopt;

  bool arrived() const { return used && !part_alone; }
  at::ScalarType dtype() const { return stored.value_or(tensor.scalar_type()); }
};

struct Slot {
  Parameter* param = nullptr;
  size_t index = 0;  // of the parameter
  ops::SlotLayout layout;
  int accumulations = 0;
  bool early = false;    // the transport has taken the gradient ahead of its bucket
  bool finite = true;    // false: the gradient was found to hold NaN or infinity
  bool checked = false;  // ... and has been looked at
  std::optional<c10::Stream> stream = std::nullopt;
  // Of a gradient that is spread over the ranks: `param.grad` is then `*proxy`, and this rank's own
  // gradient is `*pending`. Else null.
  const at::Tensor* proxy = nullptr;
  at::Tensor* pending = nullptr;

  // Whether this rank's gradient will be added to averages of earlier backwards.
  bool is_spread() const { return proxy != nullptr && proxy->is_same(param->tensor.grad()); }
  // This rank's gradient.
  const at::Tensor& grad() const { return is_spread() ? *pending : param->tensor.grad(); }
  at::Tensor& mutable_grad() const { return is_spread() ? *pending : param->tensor.mutable_grad(); }
};

using Slots = std::vector<Slot>;

// A flag that travels with the gradients and is summed over ranks: how many used the parameter;
// infinity where one of their gradients holds NaN or infinity.
float used_flag(const Slot& slot);

// Throws if `grad` cannot be a gradient of the slot's parameter, naming both.
void check_gradient(const Slot& slot, const at::Tensor& grad);

// Returns items to gather from the slots that have not been taken early: gradients, and zeros where
// there are none.
std::vector<ops::Item> gradient_items(const Slots& slots);

// Returns items to write averages into: the gradients of the slots that are `used` on any rank,
// made where there are none. Gradients at the addresses in `done`, one per slot or none, have their
// averages already.
std::vector<ops::Item> delivery_items(const Slots& slots, const std::vector<bool>& used,
                                      const std::vector<const void*>& done);

// Routes that a bucket may travel over.
struct Routes {
  std::shared_ptr<comm::Collective> group;
  std::shared_ptr<comm::Pipelines> pipelines;  // for codes
  comm::Hook hook;                             // of the user, reduces the buckets; null: none
  // The group's ranks, for regions; on a CPU only regions use it.
  std::shared_ptr<comm::Collective> shards;
  std::shared_ptr<comm::Collective> memory;  // which the ranks share; null: they do not
  std::shared_ptr<ops::BufferPool> pool = std::make_shared<ops::BufferPool>();

  // Whether this rank sends at all.
  bool communicate() const { return hook != nullptr || group->size() > 1; }
};

// How a step's gradients are taken.
struct Packing {
  ops::Scale scale;           // what gradients are multiplied by, before the sum
  bool vote = false;          // this rank votes for a new plan
  bool missed = false;        // this rank had no gradient for some slot
  bool check_finite = false;  // for NaN and infinity
  bool squares = false;       // the script clips gradients by their norm
  uint64_t step = 0;  // of the whole training, restarts included: random numbers follow from it
  bool repeatable = false;  // after a death the survivors may average the step again
  // Terms to add to the used flags, fp32, one per slot: infinity if a device has found NaN or
  // infinity. Undefined: none.
  at::Tensor infinities = {};
};

// The residual of error feedback for each parameter, fp32; undefined without one.
using Residuals = std::vector<at::Tensor>;

// A collective that this rank joins only so that the others do not wait for it.
struct Shadow {
  std::unique_ptr<comm::InFlight> in_flight;
  std::function<at::Tensor()> vote;  // after in_flight->wait(); undefined without flags
};

class Transport {
 public:
  virtual ~Transport() = default;

  // Called when a synchronising backward is about to accumulate.
  virtual void begin() {}

  // Whether the slot's gradient lives in the transport's memory, and changes with it.
  virtual bool lives_here(size_t /*slot*/) const { return false; }
  // Takes a gradient that has arrived ahead of its bucket, if that pays: sets its slot's `early`.
  virtual void take(size_t slot, const Packing& how) = 0;
  // Whether another gradient for a slot that was taken early would come too late.
  virtual bool takes_once() const = 0;
  virtual void pack(const Packing& how) = 0;
  virtual std::unique_ptr<comm::InFlight> launch() = 0;
  // `result`: what the InFlight's wait() returned.
  virtual void receive(const at::Tensor& /*result*/) {}
  // Whether the average about to be delivered is added to the gradient that was there before.
  virtual bool adds(size_t /*slot*/) const { return false; }
  // Sets the gradients of the slots that are used on any rank to the averages.
  virtual void deliver(const std::vector<bool>& used) = 0;
  // Drops the remains of a step. `in_flight`: collectives may still write to the buffers, and keep
  // them.
  virtual void abandon(bool in_flight) = 0;
  virtual Shadow shadow(uint64_t step) = 0;
  // Whether the transport holds memory that its bucket should free before the end of the backward.
  virtual bool ends_early() const { return false; }

  // Whether the user's own code moves and averages the gradients, so that errors on the way are the
  // user's.
  virtual bool is_users() const { return false; }

  // Whether flags travel with the gradients: one per slot, then the vote. flags() and vote() are
  // those of the last step, still on the device.
  virtual bool has_flags() const = 0;
  virtual at::Tensor flags() const = 0;
  virtual at::Tensor vote() const = 0;

  // Whether the gradients of all slots live in one buffer here; then the sum of their squares, the
  // same bits on every rank.
  virtual bool holds_gradients() const { return false; }
  virtual double square_sum() const { return 0.0; }

  // Bytes that this rank hands to collectives, that leave it, and that leave its node, in one step.
  virtual int64_t bytes() const = 0;
  virtual int64_t sent_bytes() const = 0;
  virtual int64_t between_nodes_bytes() const { return 0; }

  // Adds the residuals of its parameters; they may be views of its memory.
  virtual void read(Residuals& /*residuals*/) const {}
  // Sets the residuals of its parameters; undefined ones start at zero.
  virtual void load(const Residuals& /*residuals*/) {}
  // Bytes that error feedback holds; 0: none here.
  virtual int64_t residual_bytes() const { return 0; }
};

}  // namespace fastsync::engine
