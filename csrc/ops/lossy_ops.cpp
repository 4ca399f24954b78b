#include "lossy_ops.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/where.h>

#include <limits>

#include "../check.h"
#include "../kernels/select.h"

namespace fastsync::ops {
namespace {

void check_floats(const at::Tensor& tensor, const char* what) {
  FS_CHECK_VALUE(tensor.scalar_type() == at::kFloat && tensor.is_contiguous(), "expects ", what,
                 " as contiguous fp32, but got ", tensor.scalar_type(), " ", tensor.sizes());
}

}  // namespace

void select_largest(const at::Tensor& values, const at::Tensor& positions) {
  check_floats(values, "values");
  FS_CHECK_VALUE(positions.scalar_type() == at::kInt && positions.is_contiguous(),
                 "expects positions as contiguous int32");
  FS_CHECK_VALUE(positions.numel() > 0 && positions.numel() <= values.numel() &&
                     values.numel() <= std::numeric_limits<int32_t>::max(),
                 "cannot select ", positions.numel(), " of ", values.numel(), " elements");
  if (!values.is_cpu()) return select_largest_by_torch(values, positions);
  kernels::select_largest_cpu(values.const_data_ptr<float>(), values.numel(), positions.numel(),
                              positions.mutable_data_ptr<int32_t>());
}

// Keys hold the magnitude in the upper half and the distance from the end in the lower half: no two
// are equal, so the choice of the largest is unique.
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
  if (!from.is_cpu()) {
    to.copy_(at::where(at::isfinite(from), from, to));
    return;
  }
  kernels::keep_finite_cpu(from.const_data_ptr<float>(), to.mutable_data_ptr<float>(),
                           from.numel());
}

}  // namespace fastsync::ops
