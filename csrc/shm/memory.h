// Memory that the ranks of one machine share: each has a segment of its own, and maps the others'.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shm/channel.h"

namespace fastsync::comm {

class SharedMemory {
 public:
  // This rank's, of so many bytes at most. Throws std::runtime_error where the system has none to
  // share.
  explicit SharedMemory(int64_t bytes);

  const SegmentAddress& address() const { return mine_->address(); }
  // Maps the others' memory; addresses by rank, this one's among them. Throws std::runtime_error
  // where it cannot be done. `timeout`, in seconds: how long a rank may be waited for.
  void connect(const std::vector<SegmentAddress>& addresses, int64_t rank, double timeout);

  int rank() const { return static_cast<int>(rank_); }
  int size() const { return static_cast<int>(segments_.size()); }
  const std::vector<std::shared_ptr<Segment>>& segments() const { return segments_; }  // by rank
  std::chrono::milliseconds timeout() const { return timeout_; }
  // Channels, 0 to Segment::kChannels - 1, know nothing of each other. Each is made once.
  std::shared_ptr<Channel> make_channel(size_t index, std::chrono::milliseconds timeout) const;

  // In this rank's segment: zeros, or what lay there before after keep_pages().
  at::Tensor make_flat(int64_t numel, at::ScalarType dtype) const;
  // See [Note: warm pages] in segment.h.
  void keep_pages() const { mine_->keep_pages(); }
  void trim() const { mine_->trim(); }
  bool is_warm(size_t bytes) const { return mine_->is_warm(bytes); }
  // The offset of a contiguous tensor in this rank's segment; nothing if it lies elsewhere.
  std::optional<size_t> place_of(const at::Tensor& tensor) const;
  // Keeps memory that other ranks may still read although this rank does not hold it: the system
  // would give them zeros.
  void leave(const at::Tensor& tensor) const;

 private:
  std::shared_ptr<Segment> mine_;
  std::vector<std::shared_ptr<Segment>> segments_;
  size_t rank_ = 0;
  std::chrono::milliseconds timeout_{0};
};

// Barrier of the ranks of one machine, at which each gives a text and a number, in memory that they
// share.
// One thread at a time, of every rank.
class SharedStatements {
 public:
  // Uses the channel with this index, which has no other user. `timeout`: how long a rank may be
  // waited for.
  SharedStatements(const SharedMemory& memory, size_t channel, std::chrono::milliseconds timeout);

  // The numbers of all ranks, by rank; nothing where they do not all say the same. Throws
  // std::runtime_error, naming the ranks, where some have ended or did not come in time.
  std::optional<std::vector<double>> exchange(const std::string& said, double number);

 private:
  struct Word {
    uint64_t said = 0;  // a hash
    double number = 0.0;
  };

  std::shared_ptr<Channel> channel_;
  // Two in turns: a rank that has come to an exchange has read the one before.
  std::array<at::Tensor, 2> mine_;
  std::array<size_t, 2> places_{};
  size_t turn_ = 0;
};

// On the intra-op threads.
void copy_bytes(void* to, const std::byte* from, int64_t bytes);

}  // namespace fastsync::comm
