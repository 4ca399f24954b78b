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

namespace {

// FNV-1a: the same on every rank, as std::hash need not be.
uint64_t hash_of(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char letter : text) {
    hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3;
  }
  return hash;
}

}  // namespace

SharedStatements::SharedStatements(const SharedMemory& memory, size_t channel,
                                   std::chrono::milliseconds timeout)
    : channel_(memory.make_channel(channel, timeout)) {
  for (size_t i = 0; i < mine_.size(); ++i) {
    mine_[i] = memory.make_flat(static_cast<int64_t>(sizeof(Word)), at::kByte);
    places_[i] = *memory.place_of(mine_[i]);
    memory.leave(mine_[i]);  // slower ranks read the last statement, too, whatever comes after it
  }
}

std::optional<std::vector<double>> SharedStatements::exchange(const std::string& said,
                                                              double number) {
  const Word mine{hash_of(said), number};
  turn_ = (turn_ + 1) % mine_.size();
  std::memcpy(mine_[turn_].mutable_data_ptr(), &mine, sizeof(Word));
  const auto exchange = channel_->join_exchange(places_[turn_], sizeof(Word));
  // No rank shall wait for one that has given up.
  const std::shared_ptr<void> done(nullptr, [&](void*) { channel_->done_reading(exchange); });
  channel_->meet(exchange, "the others to ask for " + said);
  std::vector<double> numbers;
  bool alike = true;
  for (size_t r = 0; r < channel_->ranks(); ++r) {
    Word word;
    std::memcpy(&word, channel_->part_of(exchange, r), sizeof(Word));
    alike = alike && word.said == mine.said;
    numbers.push_back(word.number);
  }
  return alike ? std::optional(numbers) : std::nullopt;
}

}  // namespace fastsync::comm
