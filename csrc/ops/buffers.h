// The one place that allocates memory for fastsync's own tensors. An allocator of another kind,
// such as a pool or memory shared by processes, belongs here; tests/build/test_layers.py lets no
// other file ask torch for memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace fastsync::ops {

// Zero-filled, contiguous.
at::Tensor make_zeros(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device);
at::Tensor make_flat(int64_t numel, at::ScalarType dtype, at::Device device);

// Uninitialised; contiguous, or with these strides.
at::Tensor make_scratch(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device);
at::Tensor make_strided(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                        at::Device device);
// One element on the host, to which a device copies without a wait.
at::Tensor make_pinned_scalar(at::ScalarType dtype);

// One-dimensional, over memory of another owner on the host; `release` returns it.
at::Tensor make_over(void* memory, int64_t numel, at::ScalarType dtype,
                     std::function<void()> release);

// Memory at `begin` of `storage`, which it keeps alive.
at::DataPtr lend(const c10::Storage& storage, void* begin);

// With memory of its own.
at::Tensor copy_of(const at::Tensor& tensor);

// On a device: memory that the current stream still uses goes back to its allocator in that
// stream's order, whichever stream it was allocated on.
void record_here(const at::Tensor& tensor);

}  // namespace fastsync::ops
