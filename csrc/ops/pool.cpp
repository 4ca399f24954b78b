#include "pool.h"

#include <algorithm>

#include "buffers.h"
#include "ops.h"

namespace fastsync::ops {

at::Tensor BufferPool::take(int64_t numel, at::ScalarType dtype, at::Device device) {
  if (!device.is_cpu()) return make_scratch({numel}, dtype, device);
  if (reclaim_) reclaim_(/*pressed=*/false);
  auto best = find(numel, dtype);
  if (best == free_.end() && reclaim_) {
    reclaim_(/*pressed=*/true);
    best = find(numel, dtype);
  }
  if (best == free_.end()) {
    // Buffers that are now too small served smaller buckets, and would stay forever.
    const auto small = [&](const at::Tensor& buffer) { return buffer.numel() < numel; };
    free_.erase(std::remove_if(free_.begin(), free_.end(), small), free_.end());
    used_.push_back(make(numel, dtype, device));
  } else {
    used_.push_back(*best);
    free_.erase(best);
  }
  return run_of(used_.back(), 0, numel);
}

BufferPool::Free::iterator BufferPool::find(int64_t numel, at::ScalarType dtype) {
  constexpr int64_t kMuchLarger = 4;
  auto best = free_.end();
  for (auto buffer = free_.begin(); buffer != free_.end(); ++buffer) {
    // A much larger buffer is left for the bucket that it was made for.
    const bool fits = buffer->scalar_type() == dtype && buffer->numel() >= numel &&
                      buffer->numel() < kMuchLarger * numel;
    if (fits && (best == free_.end() || buffer->numel() < best->numel())) best = buffer;
  }
  return best;
}

at::Tensor BufferPool::make(int64_t numel, at::ScalarType dtype, at::Device device) const {
  return make_ ? make_(numel, dtype, device) : make_scratch({numel}, dtype, device);
}

void BufferPool::give(const at::Tensor& buffer) {
  record_here(buffer);
  const at::Tensor whole = take_back(buffer);
  if (whole.defined()) free_.push_back(whole);
}

void BufferPool::forget(const at::Tensor& buffer) { take_back(buffer); }

at::Tensor BufferPool::take_back(const at::Tensor& buffer) {
  if (!buffer.defined() || !buffer.device().is_cpu()) return {};
  for (auto used = used_.begin(); used != used_.end(); ++used) {
    if (!used->storage().is_alias_of(buffer.storage())) continue;
    const at::Tensor whole = *used;
    used_.erase(used);
    return whole;
  }
  return {};
}

}  // namespace fastsync::ops
