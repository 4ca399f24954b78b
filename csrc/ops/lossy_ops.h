// Operations of sparse codes on at::Tensors: by `kernels/` on the CPU, by torch's own operations
// elsewhere.
//
// All tensors are fp32, contiguous and on one device, unless stated otherwise.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "items.h"

namespace fastsync::ops {

// Writes to `positions`, int32 [count], those of the `count` elements of `values` [numel] with the
// largest magnitude; of equal ones the first are taken. They ascend on the CPU and have any order
// elsewhere. See kernels/select.h.
void select_largest(const at::Tensor& values, const at::Tensor& positions);
// The same by torch's operations, on any device.
void select_largest_by_torch(const at::Tensor& values, const at::Tensor& positions);

// to = from where that is finite.
void keep_finite(const at::Tensor& from, const at::Tensor& to);

// The residuals that error feedback adds to a bucket in which gradients may be absent. If no rank
// has a gradient, its average is not delivered, so the residual of an absent one stays.
class Feedback {
 public:
  // `residual` is flat, fp32, or undefined.
  Feedback(const std::vector<Item>& items, at::Tensor residual);
  // The residual to code with: zero for absent gradients.
  const at::Tensor& working() const { return working_; }
  // Writes working() back, together with the residuals of absent gradients.
  void commit() const;

 private:
  at::Tensor residual_;
  at::Tensor working_;
  std::vector<const SlotLayout*> absent_;
};

}  // namespace fastsync::ops
