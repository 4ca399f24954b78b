// A bucket's gradients, which the bucket counts and its transport moves.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../ops/items.h"

namespace fastsync::engine {

// A model parameter. Addresses are stable for the reducer's life.
struct Parameter {
  at::Tensor tensor;
  std::string name;
  // Tensor that autograd accumulates into: of a DTensor, `tensor` is the local one, whose gradient
  // Python sets when one has been accumulated.
  at::Tensor leaf;
  bool used = false;  // a gradient arrived since the last synchronisation
  // Set if the reducer checks for it: the average, and this rank's gradient, hold NaN or infinity.
  bool nonfinite = false;
  bool nonfinite_here = false;
  // Gradient accumulations in one backward; more than 1 is learned (reentrant checkpoints).
  int expected_accumulations = 1;
  // Mixed precision: the dtype that the parameter, and finally its gradient, is stored in; both
  // have another dtype in backward.
  std::optional<at::ScalarType> stored = std::nullopt;

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

}  // namespace fastsync::engine
