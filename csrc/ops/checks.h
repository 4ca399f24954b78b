// Checks of tensors' elements: squares, finiteness and digests, in front of `kernels/norm.h` and
// `kernels/digest.h`.
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

// Returns digests of the bits of each dense tensor's elements, in logical order, as signed numbers,
// which tensors can hold. Equal elements give equal digests, for any number of threads and any
// memory layout. 0 for an undefined tensor. Dispatches no operation, except for tensors that have
// to be copied because they lie on a device or in another order.
std::vector<int64_t> digests(const std::vector<at::Tensor>& tensors);

// Returns one digest of all of these, and of their order.
int64_t digest_of(const std::vector<int64_t>& digests);

}  // namespace fastsync::ops
