// What sparse codes do to at::Tensors: by `kernels/` on the CPU, by torch's own operations
// elsewhere.
//
// All tensors are fp32, contiguous and on one device, unless said.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "items.h"

namespace fastsync::ops {

// `positions`, int32 [count], become those of the `count` elements of `values` [numel] with the
// largest magnitude; of equals the first are taken. They ascend on the CPU and have any order
// elsewhere. See kernels/select.h.
void select_largest(const at::Tensor& values, const at::Tensor& positions);
// The same by torch's operations, on any device.
void select_largest_by_torch(const at::Tensor& values, const at::Tensor& positions);

// to = from where that is finite.
void keep_finite(const at::Tensor& from, const at::Tensor& to);

// What error feedback adds to a bucket, where gradients may be absent. The average of one that no
// rank has reaches nobody, so what is kept of an absent one stays.
class Feedback {
 public:
  // `residual` is flat, fp32, or undefined.
  Feedback(const std::vector<Item>& items, at::Tensor residual);
  // Writes it back, together with what stays.
  const at::Tensor& working() const { return working_; }
  // Writes it back, together with what stays.
  void commit() const;

 private:
  at::Tensor residual_;
  at::Tensor working_;
  std::vector<const SlotLayout*> absent_;
};

}  // namespace fastsync::ops
