// Operations of sparse codes on at::Tensors: by `kernels/` on the CPU, by torch's own operations
// elsewhere.
//
// All tensors are fp32, contiguous and on one device, unless stated otherwise.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastsync::ops {

// Writes to `positions`, int32 [count], those of the `count` elements of `values` [numel] with the
// largest magnitude; of equal ones the first are taken. They ascend on the CPU and have any order
// elsewhere. See kernels/select.h.
void select_largest(const at::Tensor& values, const at::Tensor& positions);
// The same by torch's operations, on any device.
void select_largest_by_torch(const at::Tensor& values, const at::Tensor& positions);

// to = from where that is finite.
void keep_finite(const at::Tensor& from, const at::Tensor& to);

}  // namespace fastsync::ops
