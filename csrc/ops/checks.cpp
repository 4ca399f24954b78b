#include "checks.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <limits>

#include "../check.h"
#include "../kernels/digest.h"
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
  const char* data = nullptr;
  int64_t numel = 0;
  int64_t elements = 0;  // that cost as much: with bytes, of fp32
  size_t tensor = 0;
};

// The blocks of all tensors, which must stay alive: of `most` elements, or of bytes, at most.
std::vector<Block> blocks_of(const std::vector<at::Tensor>& tensors, int64_t most, bool of_bytes) {
  std::vector<Block> blocks;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto* data = static_cast<const char*>(tensors[i].const_data_ptr());
    const auto each = of_bytes ? 1 : static_cast<int64_t>(tensors[i].itemsize());
    const int64_t numel = static_cast<int64_t>(tensors[i].nbytes()) / each;
    for (int64_t begin = 0; begin < numel; begin += most) {
      const int64_t here = std::min(most, numel - begin);
      blocks.push_back({data + begin * each, here, of_bytes ? here / 4 : here, i});
    }
  }
  return blocks;
}

// The results of run(block) for each block, on the intra-op threads, which share the blocks of all
// tensors: most models have many small parameters.
template <typename Result, typename Run>
std::vector<Result> for_each_block(const std::vector<Block>& blocks, const Run& run) {
  int64_t elements = 0;
  for (const Block& block : blocks) elements += block.elements;
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
  const std::vector<Block> blocks = blocks_of(elements, kSquareBlock, /*of_bytes=*/false);
  const auto squares = for_each_block<double>(blocks, [&](const Block& block) {
    const auto dtype = kernel_dtype(elements[block.tensor].scalar_type());
    return kernels::square_sum_cpu(block.data, dtype, block.numel);
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
  const std::vector<Block> blocks = blocks_of(elements, kSquareBlock, /*of_bytes=*/false);
  const auto clean = for_each_block<char>(blocks, [&](const Block& block) {
    const auto dtype = kernel_dtype(elements[block.tensor].scalar_type());
    return kernels::all_finite_cpu(block.data, dtype, block.numel) ? 1 : 0;
  });
  std::vector<bool> finite(tensors.size(), true);
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (clean[i] == 0) finite[blocks[i].tensor] = false;
  }
  return finite;
}

// -- digests --

namespace {

// Digests tensors whose elements lie in memory in logical order.
std::vector<int64_t> digests_in_place(const std::vector<at::Tensor>& tensors) {
  const std::vector<Block> blocks = blocks_of(tensors, kernels::kDigestBlock, /*of_bytes=*/true);
  const auto known = for_each_block<uint64_t>(blocks, [](const Block& block) {
    return kernels::digest_block_cpu(block.data, block.numel);
  });
  std::vector<int64_t> counts(tensors.size());
  for (const Block& block : blocks) ++counts[block.tensor];
  std::vector<int64_t> digests;
  digests.reserve(tensors.size());
  const uint64_t* next = known.data();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto bytes = static_cast<int64_t>(tensors[i].nbytes());
    digests.push_back(static_cast<int64_t>(kernels::fold_digests(next, counts[i], bytes)));
    next += counts[i];
  }
  return digests;
}

bool is_in_place(const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_python_dispatch()) return false;
  return tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// Hides the copy from dispatch modes that the user has entered.
int64_t digest_of_copy(const at::Tensor& tensor) {
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  const at::Tensor elements = tensor.resolve_conj().resolve_neg().cpu().contiguous();
  return digests_in_place({elements}).front();
}

}  // namespace

std::vector<int64_t> digests(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> results(tensors.size());
  std::vector<at::Tensor> in_place;
  std::vector<size_t> places;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) continue;
    if (is_in_place(tensors[i])) {
      in_place.push_back(tensors[i]);
      places.push_back(i);
    } else {
      results[i] = digest_of_copy(tensors[i]);  // one at a time, to hold one copy
    }
  }
  const std::vector<int64_t> known = digests_in_place(in_place);
  for (size_t i = 0; i < places.size(); ++i) results[places[i]] = known[i];
  return results;
}

int64_t digest_of(const std::vector<int64_t>& digests) {
  std::vector<uint64_t> words(digests.begin(), digests.end());
  const auto count = static_cast<int64_t>(words.size());
  return static_cast<int64_t>(kernels::fold_digests(words.data(), count, 8 * count));
}

}  // namespace fastsync::ops
