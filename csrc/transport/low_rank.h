// PowerSGD: gradients as products of thin matrices (Vogels, Karimireddy, Jaggi, "PowerSGD: Practical low-rank gradient compression
// for distributed optimization", 2019).
//
//   M = gradient / N + residual, [rows, cols]
//   P = M Q ─▶ all-reduce, with what is not compressed ─▶ orthonormalise ─▶ Q = Mᵀ P ─▶ all-reduce ─▶ average = P Qᵀ
//
// One step of a power iteration: the next step begins with this step's Q (warm start), so the approximation turns towards the
// gradients' leading singular vectors. Vectors, and matrices that are not larger than their factors, travel in the first
// all-reduce as they are, with used flags and the vote after them.
//
// Q belongs to its parameter, not to the bucket: another plan, or a checkpoint, carries it on. The first Q is the plan's own; it
// also stands in for vectors of Q that depend on others or are not finite.
//
// All ranks compute P and P Qᵀ from equal bits, by code that gives equal bits.
//
// [Note: a share of the residual]
// The average lacks the sum over ranks of M, less P Qᵀ. Each rank keeps M - P Qᵀ / N, so the residuals sum to that. The average of
// a gradient that no rank has, as the summed flags tell, reaches nobody: P then counts as zero, and each rank keeps M.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "coding.h"

namespace fastsync::engine {

struct LowRankSpec {
  // A gradient to compress. Factors are stored transposed: [rank, rows] and [rank, cols].
  struct Matrix {
    int64_t offset = 0;  // first element in the flat buffer
    int64_t rows = 0;
    int64_t cols = 0;
    int64_t rank = 0;
    int64_t left = 0;   // P's first element in the first all-reduce
    int64_t right = 0;  // Q's first element in the second
  };
  // One that is not.
  struct Run {
    int64_t offset = 0;
    int64_t numel = 0;
    int64_t place = 0;  // first element in the first all-reduce
  };

  int64_t numel = 0;  // elements of the flat buffer
  std::vector<Matrix> matrices;
  std::vector<Run> runs;
  int64_t first_numel = 0;  // elements of the first all-reduce
  int64_t second_numel = 0;
  int64_t flags_offset = 0;  // element of the first flag in the first all-reduce
  int64_t flags = 0;         // 0: none travel
  bool error_feedback = true;
  bool warm_start = true;
  uint64_t seed = 0;  // of the first Q: equal on all ranks
};

std::unique_ptr<Coding> make_low_rank(const LowRankSpec& spec, int ranks, at::Device device);

}  // namespace fastsync::engine
