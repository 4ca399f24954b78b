// Operations of sparse codes: the elements of largest magnitude, and the rest.
#pragma once

#include <cstdint>

namespace fastsync::kernels {

// Writes the ascending positions of the `count` values of largest magnitude, 0 < count <= numel <
// 2^31. Infinity counts as larger than all numbers and NaN as larger still, so that neither is left
// behind; of equal magnitudes the first ones are taken.
//
// A radix select: magnitudes of floats are in the order of their bits, so two histograms, of the
// upper and of the lower half of the bits, give the threshold exactly, in time linear in numel and
// with constant memory.
void select_largest_cpu(const float* values, int64_t numel, int64_t count, int32_t* positions);

// to = from where that is finite: the new residual of error feedback. Other values must not affect
// a later step.
void keep_finite_cpu(const float* from, float* to, int64_t numel);

}  // namespace fastsync::kernels
