#include "ops/resizable_storage.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

#include "check.h"
#include "ops/buffers.h"

namespace fastsync::ops {
namespace {

// The first bytes of `block` as a tensor.
at::Tensor typed(const at::Tensor& block, int64_t numel, at::ScalarType dtype) {
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(block.storage()),
                                           block.key_set(), c10::scalarTypeToTypeMeta(dtype));
  impl->set_sizes_and_strides(at::IntArrayRef{numel}, at::IntArrayRef{1}, 0);
  return at::Tensor(std::move(impl));
}

// Makes any access to the elements raise `message`, until `allow_access()`, if this version of
// torch can.
template <typename Storage>
auto forbid_access(Storage& storage, const std::string& message, int /*preferred*/)
    -> decltype(storage.clear_data_ptr_access_error_msg_()) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}
template <typename Storage>
void forbid_access(Storage& /*storage*/, const std::string& /*message*/, int64_t /*otherwise*/) {}

template <typename Storage>
auto allow_access(Storage& storage, int /*preferred*/)
    -> decltype(storage.clear_data_ptr_access_error_msg_()) {
  storage.clear_data_ptr_access_error_msg_();
}
template <typename Storage>
void allow_access(Storage& /*storage*/, int64_t /*otherwise*/) {}

int64_t bytes_of(int64_t numel, at::ScalarType dtype) {
  return numel * static_cast<int64_t>(c10::elementSize(dtype));
}

}  // namespace

at::Tensor BlockPool::take(int64_t numel, at::ScalarType dtype, at::Device device) {
  const c10::InferenceMode no_inference(false);
  const int64_t bytes = bytes_of(numel, dtype);
  largest_ = std::max(largest_, bytes);
  at::Tensor block = find(bytes);
  if (!block.defined()) block = make(bytes, device);
  const auto held = static_cast<int64_t>(block.storage().nbytes());
  used_.push_back({block.storage().getWeakStorageImpl(), held});
  most_ = std::max(most_, used_bytes() + free_bytes());
  return typed(block, numel, dtype);
}

// Returns a free block of that size or, without a mark, of a little more.
at::Tensor BlockPool::find(int64_t bytes) {
  const bool marked = mark_ != kNoMark;
  const int64_t most = marked ? bytes : bytes + bytes / 4;
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    if (block->numel() < bytes || block->numel() > most) continue;
    const at::Tensor found = *block;
    free_.erase(block);
    return found;
  }
  return {};
}

at::Tensor BlockPool::make(int64_t bytes, at::Device device) {
  while (!free_.empty() && used_bytes() + free_bytes() > mark_ - bytes) free_.erase(free_.begin());
  return make_scratch({bytes}, at::kByte, device);
}

int64_t BlockPool::used_bytes() {
  const auto gone = [](const UsedBlock& used) { return used.storage.expired(); };
  used_.erase(std::remove_if(used_.begin(), used_.end(), gone), used_.end());
  int64_t total = 0;
  for (const UsedBlock& used : used_) total += used.bytes;
  return total;
}

int64_t BlockPool::free_bytes() const {
  int64_t total = 0;
  for (const at::Tensor& each : free_) total += each.numel();
  return total;
}

void BlockPool::give(const at::Tensor& block) {
  if (!block.defined()) return;
  if (!block.device().is_cpu()) return record_here(block);
  const auto* const storage = block.storage().unsafeGetStorageImpl();
  const auto is_it = [&](const UsedBlock& used) {
    return used.storage._unsafe_get_target() == storage;
  };
  used_.erase(std::remove_if(used_.begin(), used_.end(), is_it), used_.end());
  free_.push_back(typed(block, static_cast<int64_t>(block.storage().nbytes()), at::kByte));
  // Free blocks must not exceed the size of two largest requests.
  while (free_bytes() > 2 * largest_) free_.erase(free_.begin());
}

ResizableStorage::ResizableStorage(int64_t numel, at::ScalarType dtype, at::Device device) {
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

void ResizableStorage::acquire(const at::Tensor& block) {
  FS_ASSERT(!block_.defined(), "memory used twice");
  FS_ASSERT(block.numel() >= flat_.numel() && block.scalar_type() == flat_.scalar_type(),
            "memory that does not fit");
  block_ = block;
  c10::StorageImpl* storage = flat_.storage().unsafeGetStorageImpl();
  allow_access(*storage, 0);
  storage->set_data_ptr_noswap(lend(block.storage(), block.storage().mutable_data()));
  storage->set_nbytes(bytes_of(flat_.numel(), flat_.scalar_type()));
}

void ResizableStorage::set_absence(std::string message) {
  absence_ = std::move(message);
  if (!has_memory()) mark_absent();
}

void ResizableStorage::mark_absent() {
  c10::StorageImpl* storage = flat_.storage().unsafeGetStorageImpl();
  if (!absence_.empty()) forbid_access(*storage, absence_, 0);
  storage->set_nbytes(static_cast<size_t>(0));
}

at::Tensor ResizableStorage::take_back() {
  if (block_.defined()) {
    c10::StorageImpl* storage = flat_.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(at::DataPtr(nullptr, flat_.device()));
    mark_absent();
  }
  return std::exchange(block_, at::Tensor());
}

}  // namespace fastsync::ops
