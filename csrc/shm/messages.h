// Messages between ranks that share a machine, in memory that all of them map; all else goes
// through the process group.
//
// A rank copies what it sends into memory that the others read (mailbox.h), and copies what it
// receives from theirs, or reads it there. All of that happens on the threads that start an
// exchange and wait for it: one of its own would take a core from the backward.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "comm/collective.h"
#include "shm/mailbox.h"
#include "shm/memory.h"

namespace fastsync::comm {

class ShmMessages final : public Collective {
 public:
  // Collective: every rank makes one over `memory`, which has no other user.
  ShmMessages(std::shared_ptr<Collective> group, std::shared_ptr<SharedMemory> memory);
  ~ShmMessages() override;
  ShmMessages(const ShmMessages&) = delete;
  ShmMessages& operator=(const ShmMessages&) = delete;

  int rank() const override { return group_->rank(); }
  int size() const override { return group_->size(); }
  int64_t leaving(int64_t /*bytes*/) const override { return 0; }
  std::unique_ptr<InFlight> all_reduce(const at::Tensor& flat) override {
    return group_->all_reduce(flat);
  }
  std::unique_ptr<InFlight> all_reduce_rows(const at::Tensor& rows, SendDense dense,
                                            at::Device device) override {
    return group_->all_reduce_rows(rows, std::move(dense), device);
  }
  std::unique_ptr<InFlight> all_to_all(const at::Tensor& received,
                                       const at::Tensor& sent) override {
    return group_->all_to_all(received, sent);
  }
  std::shared_ptr<Incoming> all_to_others(const at::Tensor& sent,
                                          const std::shared_ptr<ops::BufferPool>& pool) override {
    return group_->all_to_others(sent, pool);
  }
  std::unique_ptr<InFlight> all_gather(const at::Tensor& gathered,
                                       const at::Tensor& mine) override {
    return group_->all_gather(gathered, mine);
  }
  std::unique_ptr<InFlight> reduce_scatter(const at::Tensor& mine, const at::Tensor& all) override {
    return group_->reduce_scatter(mine, all);
  }
  bool has_messages(at::Device device) const override { return group_->has_messages(device); }
  // Exchanges under one tag come in the same order on all ranks. Any thread may wait.
  std::unique_ptr<InFlight> exchange(std::vector<Message> received, std::vector<Message> sent,
                                     int tag) override;
  std::shared_ptr<Incoming> borrow(const std::vector<Expected>& expected, at::ScalarType dtype,
                                   const std::vector<Message>& sent, int tag) override;
  // Frees what no packet has needed since the last time.
  void trim() override;

 private:
  class Packets;
  class Reading;
  class InPlace;
  struct Contents;
  // A message that others may still read.
  struct Posted {
    size_t tag = 0;
    uint64_t number = 0;
    at::Tensor packet;
  };

  std::unique_ptr<Packets> post(const std::vector<Message>& sent, size_t slot);
  at::Tensor write(const Contents& contents);
  void take_back();
  void await_readers(size_t bytes);
  std::optional<Posted> unread_by_others(size_t bytes);

  std::shared_ptr<Collective> group_;
  std::shared_ptr<SharedMemory> memory_;
  at::Tensor table_;
  SharedStatements words_;  // others may still read where the table is
  std::shared_ptr<Mailbox> mailbox_;
  std::mutex mutex_;                              // of what follows
  std::unordered_map<size_t, uint64_t> numbers_;  // of the last exchange, by tag
  std::deque<Posted> posted_;
};

}  // namespace fastsync::comm
