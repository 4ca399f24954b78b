// Transitions of a flat buffer between ranks that share a machine, in memory that all of them map:
// see channel.h for how.
//
// No thread of its own: at every launch a rank does its part of the sums that all have joined, and
// where it waits it does what is left, or reads what the others have joined with. Threads would
// take cores from the backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "comm/collective.h"
#include "shm/memory.h"

namespace fastsync::comm {

// One thread at a time, of every rank.
class ShmCollective final : public Collective {
 public:
  // Uses the channel with this index, which has no other user.
  ShmCollective(std::shared_ptr<SharedMemory> memory, size_t channel);
  // Memory that other ranks may still read, or add up, stays: see
  // [Note: memory that stays after its collective].
  ~ShmCollective() override;
  ShmCollective(const ShmCollective&) = delete;
  ShmCollective& operator=(const ShmCollective&) = delete;

  int rank() const override { return memory_->rank(); }
  int size() const override { return memory_->size(); }
  int64_t leaving(int64_t /*bytes*/) const override { return 0; }
  size_t at_a_time(at::Device /*device*/) const override { return 1; }
  void begin_step(int64_t number) override { channel_->begin_step(number); }
  // In this rank's memory.
  at::Tensor make_flat(int64_t numel, at::ScalarType dtype, at::Device device) override;

  // For a tensor that make_flat() made, on every rank. Ranks need not all ask for squares.
  std::unique_ptr<InFlight> all_reduce(const at::Tensor& flat) override {
    return all_reduce_and_square(flat, at::Tensor(), 0);
  }
  std::unique_ptr<InFlight> all_reduce_and_square(const at::Tensor& flat, const at::Tensor& squares,
                                                  int64_t squared) override;
  at::Tensor make_squares(const at::Tensor& flat) override;
  // Contiguous tensors. What is sent from memory that make_flat() made is not copied: wait() then
  // returns when all ranks have read it, else as soon as this one has.
  std::unique_ptr<InFlight> all_to_all(const at::Tensor& received, const at::Tensor& sent) override;
  // From memory that make_flat() made.
  std::shared_ptr<Incoming> all_to_others(const at::Tensor& sent,
                                          const std::shared_ptr<ops::BufferPool>& pool) override;
  std::unique_ptr<InFlight> all_gather(const at::Tensor& gathered, const at::Tensor& mine) override;
  std::unique_ptr<InFlight> reduce_scatter(const at::Tensor& mine, const at::Tensor& all) override;
  bool has_messages(at::Device /*device*/) const override { return false; }
  // Buffers that make_flat() made. What has to be copied takes from it, too.
  const std::shared_ptr<ops::BufferPool>& pool() const { return pool_; }
  // Not here: it is for ranks that send each other different sizes.
  std::unique_ptr<InFlight> exchange(std::vector<Message> received, std::vector<Message> sent,
                                     int tag) override;

 private:
  class Started;
  class Reading;
  class Borrowed;
  // A part of a tensor that another rank has joined an exchange with.
  using Parts = std::vector<const std::byte*>;
  // Memory that others may still read, and the exchange that it is for.
  struct Posted {
    Channel::Sum exchange;
    at::Tensor shown;
    bool pooled = false;           // it goes back to the pool
    std::shared_ptr<bool> read{};  // whether this rank has read what the others have shown
  };

  void make_progress();
  std::unique_ptr<InFlight> show(const at::Tensor& sent, std::function<void(const Parts&)> read,
                                 bool gathers = false);
  const Posted& post(const at::Tensor& shown, bool pooled, bool gathers = false);
  void take_back();
  void await_readers() const;
  at::Tensor stage(const at::Tensor& sent);
  bool ends_by(std::chrono::steady_clock::time_point end, const Channel::Sum& sum) const;

  std::shared_ptr<SharedMemory> memory_;
  std::shared_ptr<Channel> channel_;
  std::deque<std::shared_ptr<Started>> started_;
  std::deque<Posted> posted_;
  std::shared_ptr<ops::BufferPool> pool_;
};

}  // namespace fastsync::comm
