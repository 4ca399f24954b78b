// A bucket's way from gradients to averages.
//
// Each bucket has one, chosen with its plan: all-reduce, sparse, hooked, or a chain of collectives
// that carries codes (coded, hierarchical). The bucket counts gradients and keeps the states; the
// transport has the buffers, and does not know the states. In a step it is asked to
//
//   begin() ─▶ take()* ─▶ pack() ─▶ launch() ─▶ receive() ─▶ deliver()
//
// or to abandon() what it was about, at any point.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "../comm/collective.h"
#include "slots.h"

namespace fastsync::engine {

// How a step's gradients are taken.
struct Packing {
  double scale = 1.0;         // 1 / divisor, applied before the sum
  bool vote = false;          // this rank asks for a new plan
  bool missed = false;        // this rank had no gradient for some slot
  bool check_finite = false;  // for NaN and infinity
  bool squares = false;       // the script clips gradients by their norm
  uint64_t step = 0;  // of the whole training, restarts included: random numbers follow from it
  bool repeatable = false;  // after a death the survivors may average the step again
  // What is added to the used flags, fp32, one per slot: infinity where a device has found NaN or
  // infinity. Undefined: nothing.
  at::Tensor infinities = {};
};

// What error feedback keeps back of each parameter's averages, fp32; undefined where there is
// nothing.
using Residuals = std::vector<at::Tensor>;

// A collective that this rank joins only so that the others do not wait for it.
struct Shadow {
  std::unique_ptr<comm::InFlight> in_flight;
  std::function<at::Tensor()> vote;  // after in_flight->wait(); undefined without flags
};

class Transport {
 public:
  virtual ~Transport() = default;

  // A backward that will synchronise is about to accumulate.
  virtual void begin() {}
  // It has failed: undoes begin().
  virtual void restore() {}

  // Whether the slot's gradient lives in the transport's memory, and changes with it.
  virtual bool lives_here(size_t /*slot*/) const { return false; }
  // Takes a gradient that has arrived ahead of its bucket, where that pays: sets its slot's
  // `early`.
  virtual void take(size_t slot, const Packing& how) = 0;
  // Whether another gradient for a slot that was taken early would come too late.
  virtual bool takes_once() const = 0;
  virtual void pack(const Packing& how) = 0;
  virtual std::unique_ptr<comm::InFlight> launch() = 0;
  // `result`: what the InFlight's wait() returned.
  virtual void receive(const at::Tensor& /*result*/) {}
  // Whether the average that is about to be delivered is added to what was there before.
  virtual bool adds(size_t /*slot*/) const { return false; }
  // Makes the gradients of the slots that are used, on any rank, the averages.
  virtual void deliver(const std::vector<bool>& used) = 0;
  // Drops what a step has left. `in_flight`: collectives may still write to the buffers, and keep
  // them.
  virtual void abandon(bool in_flight) = 0;
  virtual Shadow shadow(uint64_t step) = 0;
  // Whether it holds memory that its bucket should free before the end of the backward.
  virtual bool ends_early() const { return false; }

  // Whether errors on the way between ranks are the user's own, and the gradients are averaged by
  // him.
  virtual bool is_users() const { return false; }

  // Flags travel with the gradients: one per slot, then the vote. All still on the device, of the
  // last step.
  virtual bool has_flags() const = 0;
  // Whether pack() adds `infinities` to them.
  virtual bool adds_infinities() const { return false; }
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

  // Adds those of its parameters: perhaps views of its memory.
  virtual void read(Residuals& /*residuals*/) const {}
  // The other way. Where there is nothing, it begins anew.
  virtual void load(const Residuals& /*residuals*/) {}
  // Memory that error feedback holds; 0: there is none here.
  virtual int64_t residual_bytes() const { return 0; }
};

}  // namespace fastsync::engine
