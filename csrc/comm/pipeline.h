// Chains of collectives: each link's input is made from the result of the one before, without the
// caller and without Python.
//
// On a CPU a worker thread waits between the links (see worker.h). On a device with streams
// everything is enqueued at once, on one of two streams in turn, so that neither the stream of the
// backward waits nor a chain for the last link of the one before.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "comm/collective.h"
#include "comm/worker.h"

namespace fastsync::comm {

// The collectives of one bucket.
class Links {
 public:
  virtual ~Links() = default;

  // Starts link `index` on `groups[index]`, after the one before it is done; nullptr: there is
  // none, and all is done.
  virtual std::unique_ptr<InFlight> start(size_t index, Collective& group) = 0;
  // How many links start() will start.
  virtual size_t count() const = 0;
};

// Ends when all of them have, with the result of the first; at once where there are none.
std::unique_ptr<InFlight> all_of(std::vector<std::unique_ptr<InFlight>> parts);

class Chains {
 public:
  // One process group for each link of the longest chain. See [Note: order on every rank].
  explicit Chains(std::vector<std::shared_ptr<Collective>> groups) : groups_(std::move(groups)) {}

  // See Collective::leaving().
  int64_t leaving(size_t link, int64_t bytes) const {
    return groups_[std::min(link, groups_.size() - 1)]->leaving(bytes);
  }

  // Starts the first link at once. The InFlight ends when all links are through.
  std::unique_ptr<InFlight> run(std::shared_ptr<Links> links, at::Device device);

 private:
  std::unique_ptr<InFlight> run_on_worker(std::shared_ptr<Links> links);
  std::unique_ptr<InFlight> run_on_stream(const std::shared_ptr<Links>& links, at::Device device);

  std::vector<std::shared_ptr<Collective>> groups_;
  static constexpr size_t kStreams = 2;
  std::vector<c10::Stream> streams_;  // none before the first run
  size_t runs_ = 0;
  std::unique_ptr<Worker> worker_;
};

}  // namespace fastsync::comm
