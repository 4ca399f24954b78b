// Sums of several buffers, element by element, in the order of the buffers: the arithmetic of an
// all-reduce in memory.
//
// Each element becomes buffers[0] + buffers[1] + ..., added from left to right in fp32 (fp64 for
// fp64) and rounded to the dtype once. So the bits depend on nothing but the values.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pack.h"

namespace fastsync::kernels {

// Bytes of each buffer that are summed up at once, and of the sum whose squares are.
constexpr int64_t kSumChunk = int64_t{256} << 10;

// Elements [0, numel) of `count` buffers, which must not overlap, into memory that may be one of
// them.
void sum_cpu(void* to, const void* const* from, size_t count, int64_t numel, DType dtype);

// Elements [begin, end) of `count` buffers, which must not overlap.
void sum_to_all_cpu(void* const* buffers, size_t count, int64_t begin, int64_t end, DType dtype);

}  // namespace fastsync::kernels
