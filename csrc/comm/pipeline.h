// Pipelines of collectives: each stage's input is made from the result of the one before, without
// the caller and without Python.
//
// On a CPU a worker thread waits between the stages (see worker.h). On a device with streams
// everything is enqueued at once, on one of two streams in turn, so that neither the stream of the
// backward waits nor a pipeline for the last stage of the one before.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "comm/collective.h"
#include "comm/worker.h"

namespace fastsync::comm {

// The collectives of one bucket: starts stage `index` on `group`, after the one before it is done;
// nullptr: there is none, and all is done.
using Stages = std::function<std::unique_ptr<InFlight>(size_t index, Collective& group)>;

// Ends when all of them have, with the result of the first; at once where there are none.
std::unique_ptr<InFlight> all_of(std::vector<std::unique_ptr<InFlight>> parts);

class Pipelines {
 public:
  // One process group for each stage of the longest pipeline. See [Note: order on every rank].
  explicit Pipelines(std::vector<std::shared_ptr<Collective>> groups)
      : groups_(std::move(groups)) {}

  // See Collective::leaving().
  int64_t leaving(size_t stage, int64_t bytes) const { return group(stage).leaving(bytes); }

  // Starts the first of `count` stages at once. The InFlight ends when all stages are through.
  std::unique_ptr<InFlight> run(size_t count, Stages stages, at::Device device);

 private:
  std::unique_ptr<InFlight> run_on_worker(Stages stages);
  std::unique_ptr<InFlight> run_on_stream(size_t count, Stages stages, at::Device device);
  Collective& group(size_t stage) const { return *groups_[std::min(stage, groups_.size() - 1)]; }

  std::vector<std::shared_ptr<Collective>> groups_;
  static constexpr size_t kStreams = 2;
  std::vector<c10::Stream> streams_;  // none before the first run
  size_t runs_ = 0;
  std::unique_ptr<Worker> worker_;
};

}  // namespace fastsync::comm
