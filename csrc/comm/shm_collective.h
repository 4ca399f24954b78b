// Sums over ranks that share a machine, in memory that all of them map: see shm_channel.h for how.
//
// No thread of its own: at every launch a rank does its part of the sums that all have joined, and where it waits it does what
// is left. Threads would take cores from the backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "collective.h"
#include "shm_channel.h"

namespace fastsync::comm {

// One thread at a time, of every rank.
class ShmCollective final : public SumOverRanks {
 public:
  // This rank's memory, of so many bytes at most. Throws std::runtime_error where the system has none to share.
  explicit ShmCollective(int64_t bytes);

  const SegmentAddress& address() const { return mine_->address(); }
  // Maps the others' memory; addresses by rank, this one's among them. Throws std::runtime_error where it cannot be done.
  // `timeout`, in seconds: how long a sum may wait for a rank.
  void connect(const std::vector<SegmentAddress>& addresses, int64_t rank, double timeout);

  int size() const override { return static_cast<int>(ranks_); }
  // In this rank's memory.
  at::Tensor make_flat(int64_t numel, at::ScalarType dtype, at::Device device) override;
  // Of a tensor that make_flat() made, on every rank.
  std::unique_ptr<InFlight> all_reduce(const at::Tensor& flat) override;

 private:
  class Started;
  class WaitsForSum;

  void make_progress();

  std::shared_ptr<Segment> mine_;
  size_t ranks_ = 0;
  std::shared_ptr<Channel> channel_;
  std::deque<std::shared_ptr<Started>> started_;
};

}  // namespace fastsync::comm
