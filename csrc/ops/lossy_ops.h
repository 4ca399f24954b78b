// Operations of sparse and low-rank codes on at::Tensors: by `kernels/` on the CPU, by torch's own
// operations elsewhere.
//
// All tensors are fp32, contiguous and on one device, unless said.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "../kernels/low_rank.h"
#include "items.h"

namespace fastsync::ops {

// `positions`, int32 [count], become those of the `count` elements of `values` [numel] with the largest magnitude; of equals the
// first are taken. They ascend on the CPU and have any order elsewhere. See kernels/select.h.
void select_largest(const at::Tensor& values, const at::Tensor& positions);
// The same by torch's operations, on any device.
void select_largest_by_torch(const at::Tensor& values, const at::Tensor& positions);

// to = from where that is finite.
void keep_finite(const at::Tensor& from, const at::Tensor& to);

// Makes the rows of `vectors` [count, numel] orthonormal. `refill` is undefined or of the same sizes. See kernels/low_rank.h.
// Of several at once, which are on one device.
struct Vectors {
  at::Tensor vectors;
  at::Tensor refill;
};
void orthonormalise(const std::vector<Vectors>& all);
void orthonormalise_by_torch(const at::Tensor& vectors, const at::Tensor& refill);

// matrix [rows, cols] = leftᵀ right, where these are [rank, rows] and [rank, cols]; and, where `residual` is defined, residual =
// (what was in matrix) - share * matrix, unless that is not finite.
struct LowRankProduct {
  at::Tensor left;
  at::Tensor right;
  double share = 1.0;
  at::Tensor matrix;
  at::Tensor residual;
  at::Tensor
      used;  // [1]: where it is not above zero, `left`, which it may be written to, counts as zeros; or undefined
};
void low_rank_product(const std::vector<LowRankProduct>& all);
void low_rank_product_by_torch(const at::Tensor& left, const at::Tensor& right, double share,
                               const at::Tensor& matrix, const at::Tensor& residual);

// out [rank, rows] = factor [rank, cols] matrixᵀ (kLeft), or out [rank, cols] = factor [rank, rows] matrix (kRight), of several
// matrices [rows, cols] on one device. On CPUs, and of high ranks, by torch's products.
struct Projection {
  at::Tensor matrix;
  at::Tensor factor;
  at::Tensor out;
};
void project(kernels::Factor which, const std::vector<Projection>& all);

// Uniform random numbers in [-1, 1), the same on every machine and device, of each seed.
void fill_random(const std::vector<std::pair<at::Tensor, uint64_t>>& all);

// Error feedback of a bucket in which gradients may be absent. The average of a gradient that no
// rank has is not delivered, so the residual of an absent one stays.
class Feedback {
 public:
  // `residual` is flat, fp32, or undefined.
  Feedback(const std::vector<Item>& items, at::Tensor residual);
  // Writes it back, together with what stays.
  const at::Tensor& working() const { return working_; }
  // Writes it back, together with what stays.
  void commit() const;

 private:
  at::Tensor residual_;
  at::Tensor working_;
  std::vector<const SlotLayout*> absent_;
};

}  // namespace fastsync::ops
