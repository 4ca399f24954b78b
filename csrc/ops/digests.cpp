#include "digests.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "../kernels/digest.h"
#include "parallel.h"

namespace fastsync::ops {
namespace {

using kernels::kDigestBlock;

// Consecutive bytes of a tensor.
struct DigestedBlock {
  const char* data = nullptr;
  int64_t bytes = 0;
};

int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

int64_t blocks_in(int64_t bytes) { return (bytes + kDigestBlock - 1) / kDigestBlock; }

std::vector<DigestedBlock> digested_blocks(const std::vector<const at::Tensor*>& tensors) {
  std::vector<DigestedBlock> blocks;
  for (const at::Tensor* tensor : tensors) {
    const auto* data = static_cast<const char*>(tensor->const_data_ptr());
    const int64_t bytes = bytes_of(*tensor);
    for (int64_t begin = 0; begin < bytes; begin += kDigestBlock) {
      blocks.push_back({data + begin, std::min(kDigestBlock, bytes - begin)});
    }
  }
  return blocks;
}

std::vector<uint64_t> digests_of_blocks(const std::vector<DigestedBlock>& blocks) {
  int64_t bytes = 0;
  for (const DigestedBlock& block : blocks) bytes += block.bytes;
  std::vector<uint64_t> digests(blocks.size());
  const auto count = static_cast<int64_t>(blocks.size());
  const int64_t each = bytes / std::max<int64_t>(1, count);
  parallel_ranges(count, each / 4, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      digests[i] = kernels::digest_block_cpu(blocks[i].data, blocks[i].bytes);
    }
  });
  return digests;
}

// Digests tensors whose elements lie in memory in logical order. Threads share the blocks of all
// tensors, because most models have many small parameters.
std::vector<int64_t> digests_in_place(const std::vector<const at::Tensor*>& tensors) {
  const std::vector<uint64_t> blocks = digests_of_blocks(digested_blocks(tensors));
  std::vector<int64_t> digests;
  digests.reserve(tensors.size());
  const uint64_t* next = blocks.data();
  for (const at::Tensor* tensor : tensors) {
    const int64_t bytes = bytes_of(*tensor);
    const int64_t count = blocks_in(bytes);
    digests.push_back(static_cast<int64_t>(kernels::fold_digests(next, count, bytes)));
    next += count;
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
  return digests_in_place({&elements}).front();
}

}  // namespace

std::vector<int64_t> digests(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> results(tensors.size());
  std::vector<const at::Tensor*> in_place;
  std::vector<size_t> places;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) continue;
    if (is_in_place(tensors[i])) {
      in_place.push_back(&tensors[i]);
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
