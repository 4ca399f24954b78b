#include "norms.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <limits>

#include "../check.h"
#include "buffers.h"
#include "items.h"
#include "parallel.h"

namespace fastsync::ops {
namespace {

// The elements, in any order: real, one after the other in memory.
at::Tensor elements_of(const at::Tensor& tensor) {
  at::Tensor dense = tensor.is_sparse() ? tensor.coalesce().values() : tensor;
  if (!dense.is_non_overlapping_and_dense() || dense.is_conj() || dense.is_neg()) {
    dense = dense.resolve_conj().resolve_neg().contiguous();
  }
  return dense.is_complex() ? at::view_as_real(dense) : dense;
}

// Consecutive elements of a tensor.
struct Block {
  const void* data = nullptr;
  kernels::DType dtype = kernels::DType::kFloat32;
  int64_t numel = 0;
  size_t tensor = 0;
};

// The blocks of all tensors, which must stay alive.
std::vector<Block> blocks_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Block> blocks;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto* data = static_cast<const char*>(tensors[i].const_data_ptr());
    const auto bytes = static_cast<int64_t>(tensors[i].itemsize());
    const kernels::DType dtype = kernel_dtype(tensors[i].scalar_type());
    const int64_t numel = tensors[i].numel();
    for (int64_t begin = 0; begin < numel; begin += kSquareBlock) {
      blocks.push_back({data + begin * bytes, dtype, std::min(kSquareBlock, numel - begin), i});
    }
  }
  return blocks;
}

// The results of run(block) for each block, on the intra-op threads.
template <typename Result, typename Run>
std::vector<Result> for_each_block(const std::vector<Block>& blocks, const Run& run) {
  int64_t elements = 0;
  for (const Block& block : blocks) elements += block.numel;
  std::vector<Result> results(blocks.size());
  const auto count = static_cast<int64_t>(blocks.size());
  parallel_ranges(count, elements / std::max<int64_t>(1, count), [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      results[i] = run(blocks[i]);
    }
  });
  return results;
}

std::vector<at::Tensor> elements_of_all(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> elements;
  elements.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) elements.push_back(elements_of(tensor));
  return elements;
}

std::vector<bool> finite_by_torch(const std::vector<at::Tensor>& tensors) {
  const at::Tensor known = finite_on_device(tensors).cpu();
  const bool* values = known.const_data_ptr<bool>();
  return std::vector<bool>(values, values + known.numel());
}

}  // namespace

at::Tensor finite_on_device(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> elements = elements_of_all(tensors);
  for (at::Tensor& each : elements) {  // nothing has no largest element
    if (each.numel() == 0) each = make_zeros({1}, each.scalar_type(), each.device());
  }
  const double largest = std::numeric_limits<double>::infinity();
  return at::isfinite(at::stack(at::_foreach_norm(elements, largest)));
}

std::vector<double> square_sums(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& tensor : tensors) {
    FS_CHECK_VALUE(tensor.is_cpu(), "expects tensors on a CPU, but one is on ", tensor.device());
  }
  const std::vector<at::Tensor> elements = elements_of_all(tensors);
  const std::vector<Block> blocks = blocks_of(elements);
  const auto squares = for_each_block<double>(blocks, [](const Block& block) {
    return kernels::square_sum_cpu(block.data, block.dtype, block.numel);
  });
  std::vector<double> sums(tensors.size());
  for (size_t i = 0; i < blocks.size(); ++i) sums[blocks[i].tensor] += squares[i];
  return sums;
}

std::vector<bool> all_finite(const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) return {};
  const at::NoGradGuard no_grad;
  if (!tensors.front().is_cpu()) return finite_by_torch(tensors);
  const std::vector<at::Tensor> elements = elements_of_all(tensors);
  const std::vector<Block> blocks = blocks_of(elements);
  const auto clean = for_each_block<char>(blocks, [](const Block& block) {
    return kernels::all_finite_cpu(block.data, block.dtype, block.numel) ? 1 : 0;
  });
  std::vector<bool> finite(tensors.size(), true);
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (clean[i] == 0) finite[blocks[i].tensor] = false;
  }
  return finite;
}

}  // namespace fastsync::ops
