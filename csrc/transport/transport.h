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

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "../comm/collective.h"
#include "../ops/ops.h"
#include "slots.h"

namespace fastsync::engine {

// How a step's gradients are taken.
struct Packing {
  ops::Scale scale;           // 1 / divisor, applied before the sum
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
