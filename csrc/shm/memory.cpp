#include "shm/memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ops/buffers.h"
#include "ops/parallel.h"

namespace fastsync::comm {

SharedMemory::SharedMemory(int64_t bytes) : mine_(Segment::make(static_cast<size_t>(bytes))) {}

void SharedMemory::connect(const std::vector<SegmentAddress>& addresses, int64_t rank,
                           double timeout) {
  std::vector<std::shared_ptr<Segment>> segments;
  for (size_t r = 0; r < addresses.size(); ++r) {
    const bool own = static_cast<int64_t>(r) == rank;
    segments.push_back(own ? mine_ : Segment::open(addresses[r]));
  }
  segments_ = std::move(segments);
  rank_ = static_cast<size_t>(rank);
  const auto limit = std::chrono::duration<double>(timeout);
  timeout_ = std::chrono::duration_cast<std::chrono::milliseconds>(limit);
}

std::shared_ptr<Channel> SharedMemory::make_channel(size_t index) const {
  return make_channel(index, timeout_);
}

std::shared_ptr<Channel> SharedMemory::make_channel(size_t index,
                                                    std::chrono::milliseconds timeout) const {
  return std::make_shared<Channel>(segments_, rank_, timeout, index);
}

at::Tensor SharedMemory::make_flat(int64_t numel, at::ScalarType dtype) const {
  const auto bytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  const size_t offset = mine_->take(bytes);
  return ops::make_over(mine_->data() + offset, numel, dtype,
                        [segment = mine_, offset] { segment->give(offset); });
}

std::optional<size_t> SharedMemory::place_of(const at::Tensor& tensor) const {
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  const std::byte* const begin = mine_->data();
  if (data < begin || data >= begin + mine_->address().bytes) return {};
  return static_cast<size_t>(data - begin);
}

void SharedMemory::leave(const at::Tensor& tensor) const {
  if (!tensor.defined() || !tensor.has_storage()) return;
  if (const auto place = place_of(tensor)) mine_->leave(*place);
}

void copy_bytes(void* to, const std::byte* from, int64_t bytes) {
  constexpr int64_t kElements = Channel::kChunkBytes / 4;
  const int64_t chunks = (bytes + Channel::kChunkBytes - 1) / Channel::kChunkBytes;
  ops::parallel_ranges(chunks, kElements, [&](int64_t first, int64_t last) {
    const int64_t begin = first * Channel::kChunkBytes;
    const int64_t end = std::min(bytes, last * Channel::kChunkBytes);
    std::memcpy(static_cast<std::byte*>(to) + begin, from + begin,
                static_cast<size_t>(end - begin));
  });
}

}  // namespace fastsync::comm
