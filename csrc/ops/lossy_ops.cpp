#include "lossy_ops.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mv.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "../check.h"
#include "../kernels/select.h"
#include "buffers.h"

namespace fastsync::ops {
namespace {

const float* data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr;
}
float* mutable_data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr<float>() : nullptr;
}

void check_floats(const at::Tensor& tensor, const char* what) {
  FS_CHECK_VALUE(tensor.scalar_type() == at::kFloat && tensor.is_contiguous(), "expects ", what,
                 " as contiguous fp32, but got ", tensor.scalar_type(), " ", tensor.sizes());
}

void check_product(const at::Tensor& left, const at::Tensor& right, const at::Tensor& matrix,
                   const at::Tensor& residual) {
  check_floats(left, "factors");
  check_floats(right, "factors");
  check_floats(matrix, "a matrix");
  FS_CHECK_VALUE(left.size(0) == right.size(0) && matrix.size(0) == left.size(1) &&
                     matrix.size(1) == right.size(1),
                 "factors ", left.sizes(), " and ", right.sizes(), " make no ", matrix.sizes());
  if (!residual.defined()) return;
  check_floats(residual, "a residual");
  FS_CHECK_VALUE(residual.sizes() == matrix.sizes(), "expects a residual like the matrix");
}

// A vector without its parts along the rows of `others`.
at::Tensor without(const at::Tensor& others, at::Tensor vector) {
  for (int pass = 0; pass < 2; ++pass) {
    for (int64_t k = 0; k < others.size(0); ++k) {
      vector = vector - others[k] * others[k].dot(vector);
    }
  }
  return vector;
}

struct Direction {
  at::Tensor unit;
  at::Tensor dependent;  // bool []
};

// Divides by the largest element first, so that squares neither overflow nor vanish.
Direction direction(const at::Tensor& others, const at::Tensor& vector) {
  const at::Tensor largest = vector.abs().max();
  const at::Tensor scaled = at::where(largest > 0, vector / largest, vector);
  const at::Tensor left = without(others, scaled);
  const at::Tensor length = left.norm();
  return {left / length, length <= kernels::kDependent * scaled.norm()};
}

kernels::LowRankArgs args_of(const LowRankProduct& one) {
  return {data(one.left),   data(one.right),   one.left.size(0),
          one.left.size(1), one.right.size(1), static_cast<float>(one.share)};
}

void project_by_torch(kernels::Factor which, const Projection& one) {
  at::Tensor out = one.out;
  at::mm_out(out, one.factor, which == kernels::Factor::kLeft ? one.matrix.t() : one.matrix);
}

kernels::FactorJob job_of(kernels::Factor which, const Projection& one) {
  const auto& [matrix, factor, out] = one;
  check_floats(matrix, "a matrix");
  check_floats(factor, "a factor");
  check_floats(out, "a factor");
  const bool left = which == kernels::Factor::kLeft;
  FS_CHECK_VALUE(factor.size(0) == out.size(0) && factor.size(1) == matrix.size(left ? 1 : 0) &&
                     out.size(1) == matrix.size(left ? 0 : 1),
                 "a factor ", factor.sizes(), " and a matrix ", matrix.sizes(), " make no ",
                 out.sizes());
  return {data(matrix),   data(factor),   mutable_data(out),
          factor.size(0), matrix.size(0), matrix.size(1)};
}

void multiply_on_cpu(const LowRankProduct& one) {
  const at::NoGradGuard no_grad;
  if (one.used.defined() && !(*data(one.used) > 0)) one.left.mul_(0.0);
  const kernels::LowRankArgs args = args_of(one);
  float* out = mutable_data(one.matrix);
  float* lost = mutable_data(one.residual);
  parallel_ranges(args.rows, args.cols, [&](int64_t begin, int64_t end) {
    kernels::low_rank_product_cpu(args, begin, end, out, lost);
  });
}

}  // namespace

void select_largest(const at::Tensor& values, const at::Tensor& positions) {
  check_floats(values, "values");
  FS_CHECK_VALUE(positions.scalar_type() == at::kInt && positions.is_contiguous(),
                 "expects positions as contiguous int32");
  FS_CHECK_VALUE(positions.numel() > 0 && positions.numel() <= values.numel() &&
                     values.numel() <= std::numeric_limits<int32_t>::max(),
                 "cannot select ", positions.numel(), " of ", values.numel(), " elements");
  run_kernel_or_torch(
      values.device(),
      [&] {
        kernels::select_largest_cpu(data(values), values.numel(), positions.numel(),
                                    positions.mutable_data_ptr<int32_t>());
      },
      [&] { select_largest_by_torch(values, positions); });
}

// Magnitude in the upper half, how far from the end in the lower one: no two are equal, so which are largest is settled.
void select_largest_by_torch(const at::Tensor& values, const at::Tensor& positions) {
  const at::NoGradGuard no_grad;
  const int64_t numel = values.numel();
  const at::Tensor magnitudes = values.view(at::kInt).bitwise_and(0x7fffffff).to(at::kLong);
  const at::Tensor order = at::arange(numel - 1, -1, -1, magnitudes.options());
  const at::Tensor keys = magnitudes.mul(int64_t{1} << 32).add_(order);
  positions.copy_(std::get<1>(at::topk(keys, positions.numel())));
}

void keep_finite(const at::Tensor& from, const at::Tensor& to) {
  const at::NoGradGuard no_grad;
  run_kernel_or_torch(
      from.device(), [&] { kernels::keep_finite_cpu(data(from), mutable_data(to), from.numel()); },
      [&] { to.copy_(at::where(at::isfinite(from), from, to)); });
}

void orthonormalise(const std::vector<Vectors>& all) {
  if (all.empty()) return;
  std::vector<kernels::VectorSet> sets;
  for (const auto& [vectors, refill] : all) {
    check_floats(vectors, "vectors");
    if (refill.defined()) {
      check_floats(refill, "vectors");
      FS_CHECK_VALUE(refill.sizes() == vectors.sizes(), "expects as many vectors to refill from");
    }
    sets.push_back({mutable_data(vectors), data(refill), vectors.size(0), vectors.size(1)});
  }
  run_kernel(
      all.front().vectors.device(),
      [&] {
        for (const kernels::VectorSet& set : sets) {
          kernels::orthonormalise_cpu(set.vectors, set.count, set.numel, set.refill);
        }
      },
      [&](auto stream) { kernels::orthonormalise_cuda(sets.data(), sets.size(), stream); });
}

void orthonormalise_by_torch(const at::Tensor& vectors, const at::Tensor& refill) {
  const at::NoGradGuard no_grad;
  for (int64_t k = 0; k < vectors.size(0); ++k) {
    const at::Tensor before = vectors.narrow(0, 0, k);
    at::Tensor vector = vectors[k];
    if (refill.defined()) {
      vector = at::where(at::isfinite(vector).all(), vector, refill[k]);
    }
    Direction found = direction(before, vector);
    if (refill.defined()) {
      const Direction other = direction(before, refill[k]);
      found.unit = at::where(found.dependent, other.unit, found.unit);
      found.dependent = found.dependent.logical_and(other.dependent);
    }
    vectors[k].copy_(found.unit.masked_fill(found.dependent, 0.0));
  }
}

void low_rank_product(const std::vector<LowRankProduct>& all) {
  if (all.empty()) return;
  std::vector<kernels::LowRankJob> jobs;
  for (const LowRankProduct& one : all) {
    check_product(one.left, one.right, one.matrix, one.residual);
    jobs.push_back(
        {args_of(one), mutable_data(one.matrix), mutable_data(one.residual), data(one.used)});
  }
  run_kernel(
      all.front().matrix.device(),
      [&] {
        for (const LowRankProduct& one : all) multiply_on_cpu(one);
      },
      [&](auto stream) { kernels::low_rank_product_cuda(jobs.data(), jobs.size(), stream); });
}

void low_rank_product_by_torch(const at::Tensor& left, const at::Tensor& right, double share,
                               const at::Tensor& matrix, const at::Tensor& residual) {
  const at::NoGradGuard no_grad;
  const at::Tensor product = at::mm(left.t(), right);
  if (residual.defined()) keep_finite(matrix - product * share, residual);
  matrix.copy_(product);
}

void project(kernels::Factor which, const std::vector<Projection>& all) {
  const at::NoGradGuard no_grad;
  std::vector<kernels::FactorJob> jobs;
  for (const Projection& one : all) {
    const kernels::FactorJob job = job_of(which, one);
    if (one.matrix.is_cpu() || job.rank > kernels::kMostFactorRank) {
      project_by_torch(which, one);
    } else {
      jobs.push_back(job);
    }
  }
  if (jobs.empty()) return;
  const at::Device device = all.front().matrix.device();
  run_kernel(
      device, [] {},
      [&](auto stream) {
        int64_t floats = 0;
        for (const auto& job : jobs) floats += kernels::factor_scratch(which, job);
        const at::Tensor scratch = make_scratch({floats}, at::kFloat, device);
        kernels::factors_cuda(which, jobs.data(), jobs.size(), mutable_data(scratch), stream);
      });
}

void fill_random(const std::vector<std::pair<at::Tensor, uint64_t>>& all) {
  if (all.empty()) return;
  std::vector<kernels::RandomRun> runs;
  for (const auto& [values, seed] : all) {
    check_floats(values, "values");
    runs.push_back({mutable_data(values), values.numel(), seed});
  }
  run_kernel(
      all.front().first.device(),
      [&] {
        for (const kernels::RandomRun& run : runs) {
          kernels::fill_random(run.values, run.numel, run.seed);
        }
      },
      [&](auto stream) { kernels::fill_random_cuda(runs.data(), runs.size(), stream); });
}

Feedback::Feedback(const std::vector<Item>& items, at::Tensor residual)
    : residual_(std::move(residual)), working_(residual_) {
  if (!residual_.defined()) return;
  for (const Item& item : items) {
    if (!item.tensor.defined()) absent_.push_back(item.layout);
  }
  if (absent_.empty()) return;
  const at::NoGradGuard no_grad;
  working_ = copy_of(residual_);
  for (const SlotLayout* slot : absent_) working_.narrow(0, slot->offset, slot->numel).zero_();
}

void Feedback::commit() const {
  if (absent_.empty()) return;
  const at::NoGradGuard no_grad;
  for (const SlotLayout* slot : absent_) {
    working_.narrow(0, slot->offset, slot->numel)
        .add_(residual_.narrow(0, slot->offset, slot->numel));
  }
  residual_.copy_(working_);
}

}  // namespace fastsync::ops
