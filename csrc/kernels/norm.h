// Checks of gradients before a step: the sum of their squares, and whether all elements are finite.
//
// Raw pointers; hosts only. A sum depends on the elements and their number alone, neither on the
// instruction set nor on where the memory begins: ranks that clip equal gradients must clip them
// alike.
#pragma once

#include <cstdint>

#include "pack.h"

namespace fastsync::kernels {

// Elements whose squares are summed up by themselves; the sums of blocks are added in order.
constexpr int64_t kSquareBlock = int64_t{1} << 16;

// In fp64, where the squares of narrower types are exact and cannot overflow. NaN or infinite where
// an element is.
double square_sum_cpu(const void* data, DType dtype, int64_t numel);

bool all_finite_cpu(const void* data, DType dtype, int64_t numel);

}  // namespace fastsync::kernels
