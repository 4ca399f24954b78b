#include "digests.h"

#include <ATen/core/grad_mode.h>

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

std::vector<DigestedBlock> digested_blocks(const at::Tensor& elements) {
  std::vector<DigestedBlock> blocks;
  const auto* data = static_cast<const char*>(elements.const_data_ptr());
  const auto bytes = static_cast<int64_t>(elements.nbytes());
  for (int64_t begin = 0; begin < bytes; begin += kDigestBlock) {
    blocks.push_back({data + begin, std::min(kDigestBlock, bytes - begin)});
  }
  return blocks;
}

int64_t digest_of(const at::Tensor& tensor) {
  const at::Tensor elements = tensor.resolve_conj().resolve_neg().cpu().contiguous();
  const std::vector<DigestedBlock> blocks = digested_blocks(elements);
  std::vector<uint64_t> digests(blocks.size());
  const auto count = static_cast<int64_t>(blocks.size());
  parallel_ranges(count, kDigestBlock / 4, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      digests[i] = kernels::digest_block_cpu(blocks[i].data, blocks[i].bytes);
    }
  });
  const auto bytes = static_cast<int64_t>(elements.nbytes());
  return static_cast<int64_t>(kernels::fold_digests(digests.data(), count, bytes));
}

}  // namespace

std::vector<int64_t> digests(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> results;
  results.reserve(tensors.size());
  // One after the other: copies that are needed to digest one do not outlive it.
  for (const at::Tensor& tensor : tensors) results.push_back(digest_of(tensor));
  return results;
}

}  // namespace fastsync::ops
