// Barrier of the ranks of one machine, at which each gives a text and a number, in memory that they
// share.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shm/memory.h"

namespace fastsync::comm {

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

}  // namespace fastsync::comm
