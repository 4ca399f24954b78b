// Digests of tensors, in front of `kernels/digest.h`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fastsync::ops {

// Returns digests of the bits of each dense tensor's elements, in logical order, as signed numbers,
// which tensors can hold. Equal elements give equal digests, for any number of threads and any
// memory layout. 0 for an undefined tensor. Dispatches no operation, except for tensors that have
// to be copied because they lie on a device or in another order.
std::vector<int64_t> digests(const std::vector<at::Tensor>& tensors);

// Returns one digest of all of these, and of their order.
int64_t digest_of(const std::vector<int64_t>& digests);

}  // namespace fastsync::ops
