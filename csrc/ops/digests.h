// Digests of tensors, in front of `kernels/digest.h`.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fastsync::ops {

// Of the bits of each dense tensor's elements, in logical order, as a signed number, which is what tensors can hold. Equal
// wherever the elements are, however many threads there are and however the elements lie in memory. A tensor on a device is
// copied to the host.
std::vector<int64_t> digests(const std::vector<at::Tensor>& tensors);

}  // namespace fastsync::ops
