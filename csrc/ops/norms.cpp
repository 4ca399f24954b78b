#include "norms.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <limits>

#include "../check.h"
#include "../kernels/norm.h"
#include "items.h"
#include "parallel.h"

namespace fastsync::ops {
namespace {

// What one thread sums up by itself.
constexpr int64_t kBlock = int64_t{1} << 16;

// The elements, in any order: real, one after the other in memory.
at::Tensor elements_of(const at::Tensor& tensor) {
  at::Tensor dense = tensor.is_sparse() ? tensor.coalesce().values() : tensor;
  if (!dense.is_non_overlapping_and_dense() || dense.is_conj() || dense.is_neg()) {
    dense = dense.resolve_conj().resolve_neg().contiguous();
  }
  return dense.is_complex() ? at::view_as_real(dense) : dense;
}

// Calls run(begin, numel, block) for each block of `tensor`, on the intra-op threads.
template <typename Run>
void for_each_block(const at::Tensor& tensor, const Run& run) {
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  const int64_t numel = tensor.numel();
  parallel_ranges((numel + kBlock - 1) / kBlock, kBlock, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      const int64_t begin = block * kBlock;
      const auto bytes = static_cast<int64_t>(tensor.itemsize());
      run(data + begin * bytes, std::min(kBlock, numel - begin), static_cast<size_t>(block));
    }
  });
}

double square_sum(const at::Tensor& tensor) {
  const at::Tensor elements = elements_of(tensor);
  const kernels::DType dtype = kernel_dtype(elements.scalar_type());
  std::vector<double> sums(static_cast<size_t>((elements.numel() + kBlock - 1) / kBlock));
  for_each_block(elements, [&](const void* data, int64_t numel, size_t block) {
    sums[block] = kernels::square_sum_cpu(data, dtype, numel);
  });
  double total = 0.0;
  for (const double sum : sums) total += sum;
  return total;
}

bool is_finite(const at::Tensor& tensor) {
  const at::Tensor elements = elements_of(tensor);
  const kernels::DType dtype = kernel_dtype(elements.scalar_type());
  std::vector<char> finite(static_cast<size_t>((elements.numel() + kBlock - 1) / kBlock));
  for_each_block(elements, [&](const void* data, int64_t numel, size_t block) {
    finite[block] = kernels::all_finite_cpu(data, dtype, numel) ? 1 : 0;
  });
  return std::all_of(finite.begin(), finite.end(), [](char one) { return one != 0; });
}

std::vector<bool> finite_by_torch(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> elements;
  for (const at::Tensor& tensor : tensors) elements.push_back(elements_of(tensor));
  const double largest = std::numeric_limits<double>::infinity();
  const at::Tensor known = at::isfinite(at::stack(at::_foreach_norm(elements, largest))).cpu();
  const bool* values = known.const_data_ptr<bool>();
  return std::vector<bool>(values, values + known.numel());
}

}  // namespace

std::vector<double> square_sums(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<double> sums;
  for (const at::Tensor& tensor : tensors) {
    FS_CHECK_VALUE(tensor.is_cpu(), "expects tensors on a CPU, but one is on ", tensor.device());
    sums.push_back(square_sum(tensor));
  }
  return sums;
}

std::vector<bool> all_finite(const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) return {};
  const at::NoGradGuard no_grad;
  if (!tensors.front().is_cpu()) return finite_by_torch(tensors);
  std::vector<bool> finite;
  for (const at::Tensor& tensor : tensors) finite.push_back(is_finite(tensor));
  return finite;
}

}  // namespace fastsync::ops
