#include "loan.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

#include "../check.h"
#include "buffers.h"

namespace fastsync::ops {
namespace {

// Of the first bytes of `block`.
at::Tensor typed(const at::Tensor& block, int64_t numel, at::ScalarType dtype) {
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(block.storage()),
                                           block.key_set(), c10::scalarTypeToTypeMeta(dtype));
  impl->set_sizes_and_strides(at::IntArrayRef{numel}, at::IntArrayRef{1}, 0);
  return at::Tensor(std::move(impl));
}

void drop_reference(void* storage) {
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(storage));
}

int64_t bytes_of(int64_t numel, at::ScalarType dtype) {
  return numel * static_cast<int64_t>(c10::elementSize(dtype));
}

}  // namespace

at::Tensor BlockPool::take(int64_t numel, at::ScalarType dtype, at::Device device) {
  const c10::InferenceMode no_inference(false);
  const int64_t bytes = bytes_of(numel, dtype);
  largest_ = std::max(largest_, bytes);
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    if (block->numel() < bytes || block->numel() > bytes + bytes / 4) continue;
    const at::Tensor found = *block;
    free_.erase(block);
    return typed(found, numel, dtype);
  }
  return typed(make_ ? make_(bytes) : make_scratch({bytes}, at::kByte, device), numel, dtype);
}

void BlockPool::give(const at::Tensor& block) {
  if (!block.defined() || !block.device().is_cpu()) return;
  const auto bytes = static_cast<int64_t>(block.storage().nbytes());
  free_.push_back(typed(block, bytes, at::kByte));
  // What is free must not exceed what two requests can use.
  int64_t total = 0;
  for (const at::Tensor& each : free_) total += each.numel();
  while (total > 2 * largest_) {
    total -= free_.front().numel();
    free_.erase(free_.begin());
  }
}

Loan::Loan(int64_t numel, at::ScalarType dtype, at::Device device) {
  const c10::InferenceMode no_inference(false);
  const at::Tensor like = make_scratch({0}, dtype, device);
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                       at::DataPtr(nullptr, like.device()),
                                                       /*allocator=*/nullptr, /*resizable=*/false);
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(std::move(storage)), like.key_set(), like.dtype());
  impl->set_sizes_and_strides(at::IntArrayRef{numel}, at::IntArrayRef{1}, 0);
  flat_ = at::Tensor(std::move(impl));
}

void Loan::lend(const at::Tensor& block) {
  FS_ASSERT(!block_.defined(), "memory lent twice");
  FS_ASSERT(block.numel() >= flat_.numel() && block.scalar_type() == flat_.scalar_type(),
            "memory that does not fit");
  block_ = block;
  c10::StorageImpl* storage = flat_.storage().unsafeGetStorageImpl();
  at::DataPtr memory(block.storage().mutable_data(),
                     c10::Storage(block.storage()).unsafeReleaseStorageImpl(), &drop_reference,
                     block.device());
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes_of(flat_.numel(), flat_.scalar_type()));
}

at::Tensor Loan::take_back() {
  if (block_.defined()) {
    c10::StorageImpl* storage = flat_.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(at::DataPtr(nullptr, flat_.device()));
    storage->set_nbytes(static_cast<size_t>(0));
  }
  return std::exchange(block_, at::Tensor());
}

}  // namespace fastsync::ops
