// What low-rank codes need: orthonormal vectors, and the product of two thin matrices.
//
// Ranks compute these from equal input and must get equal bits, so nothing here depends on a library that chooses its algorithm
// by processor.
#pragma once

#include <cstdint>

namespace fastsync::kernels {

// Makes `count` vectors of `numel` elements, one after the other in memory, orthonormal: Gram-Schmidt, each projection done
// twice, with sums in double. A vector that depends on those before it becomes zero, and NaN spreads. With `refill`, vectors of
// the same sizes, it is replaced by its counterpart instead, and so is one that is not finite.
void orthonormalise_cpu(float* vectors, int64_t count, int64_t numel, const float* refill);

// Below this part of its length, what is left of a vector is rounding.
constexpr double kDependent = 1e-6;

// Uniform in [-1, 1), the same on every machine.
void fill_random(float* values, int64_t numel, uint64_t seed);

struct LowRankArgs {
  const float* left = nullptr;   // [rank, rows]
  const float* right = nullptr;  // [rank, cols]
  int64_t rank = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  float share = 1.0F;
};

// Rows [begin, end): matrix = leftᵀ right; and, where `residual` is given, residual = (what was in matrix) - share * matrix
// unless that is not finite.
void low_rank_product_cpu(const LowRankArgs& args, int64_t begin, int64_t end, float* matrix,
                          float* residual);

}  // namespace fastsync::kernels
