// What low-rank codes need: orthonormal vectors, the product of two thin matrices, and on devices what they are made from.
//
// Ranks compute the first two from equal input and must get equal bits, so nothing here depends on a library that chooses its
// algorithm by processor.
#pragma once

#include <cstddef>
#include <cstdint>

#include "random.h"

struct CUstream_st;

namespace fastsync::kernels {

// Makes `count` vectors of `numel` elements, one after the other in memory, orthonormal: Gram-Schmidt, each projection done
// twice, with sums in double. A vector that depends on those before it becomes zero, and NaN spreads. With `refill`, vectors of
// the same sizes, it is replaced by its counterpart instead, and so is one that is not finite.
void orthonormalise_cpu(float* vectors, int64_t count, int64_t numel, const float* refill);

// Below this part of its length, what is left of a vector is rounding.
constexpr double kDependent = 1e-6;

// Element i of what the seed that `start` is mixed(seed) of stands for: uniform in [-1, 1), the same on every machine.
FS_HOST_DEVICE float random_value(uint64_t start, int64_t i) {
  constexpr int32_t half = 1 << 23;
  const uint64_t bits = mixed(start + static_cast<uint64_t>(i)) >> 40;
  return static_cast<float>(static_cast<int32_t>(bits) - half) / static_cast<float>(half);
}

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

// What one call of the functions above is given. On a device one launch serves the sets, runs or matrices of a whole bucket.
struct VectorSet {
  float* vectors;
  const float* refill;
  int64_t count;
  int64_t numel;
};
struct RandomRun {
  float* values;
  int64_t numel;
  uint64_t seed;
};
struct LowRankJob {
  LowRankArgs args;
  float* matrix;
  float* residual;
  const float* used;  // where that is not above zero, `left` counts as zeros; or nullptr
};

// A matrix times thin ones, on devices: `out` [rank, rows] is factor [rank, cols] times the matrix turned over, or [rank, cols] is
// factor [rank, rows] times the matrix. Torch's own products are a call for each matrix.
struct FactorJob {
  const float* matrix;  // [rows, cols]
  const float* factor;
  float* out;
  int64_t rank;
  int64_t rows;
  int64_t cols;
};
enum class Factor { kLeft, kRight };  // which one is made: [rank, rows], or [rank, cols]

// Every so many vectors read the matrix once more, so torch's product is faster with many.
constexpr int64_t kMostFactorRank = 16;

// Floats that factors_cuda() needs to work in.
int64_t factor_scratch(Factor which, const FactorJob& job);
// Sums are in fp32, in an order that sizes alone decide. `scratch`: for all jobs together.
void factors_cuda(Factor which, const FactorJob* jobs, size_t count, float* scratch,
                  CUstream_st* stream);

// Sums of a vector add up in another order than on a CPU, always the same one; the rest is as there.
void orthonormalise_cuda(const VectorSet* sets, size_t count, CUstream_st* stream);
void fill_random_cuda(const RandomRun* runs, size_t count, CUstream_st* stream);
void low_rank_product_cuda(const LowRankJob* jobs, size_t count, CUstream_st* stream);

}  // namespace fastsync::kernels
