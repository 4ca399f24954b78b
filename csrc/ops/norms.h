// Squares and finiteness of gradients, in front of `kernels/norm.h`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "../kernels/norm.h"

namespace fastsync::ops {

using kernels::kSquareBlock;

// The sum of the squares of each tensor's elements, on a CPU: in fp64, and the same on every rank
// that has the same elements, however many threads it has. Sparse tensors count with their values.
std::vector<double> square_sums(const std::vector<at::Tensor>& tensors);

// Whether each tensor holds neither NaN nor infinity. On a device the host waits for the answer.
std::vector<bool> all_finite(const std::vector<at::Tensor>& tensors);
// The same for those of a device, where the answer stays: bool, one per tensor.
at::Tensor finite_on_device(const std::vector<at::Tensor>& tensors);

}  // namespace fastsync::ops
