// Messages between ranks, over a c10d backend that sends and receives tensors (Gloo).
//
// [Note: announce first]
// Gloo sends once the receiver has announced that it is ready, and what a rank writes to another
// leaves in order. If both of two ranks first sent, the announcement of the later one would stand
// behind all its data: the two directions would take turns. Gloo's own collectives do that, and
// ranks hardly ever start at the same moment. So a rank posts all receives before its first send.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "in_flight.h"
#include "worker.h"

namespace c10d {
class Backend;
}

namespace fastsync::comm {

// A contiguous tensor that goes to a rank, or is to come from it.
struct Message {
  int rank = 0;
  at::Tensor tensor;
};

// Threads on which exchanges are started and, where the caller asks without waiting, waited for.
class ExchangeThreads {
 public:
  Worker& starter() { return starter_; }
  Worker& waiter() {
    std::call_once(waits_, [this] { waiter_ = std::make_unique<Worker>(); });
    return *waiter_;
  }

 private:
  Worker starter_;
  std::once_flag waits_;
  std::unique_ptr<Worker> waiter_;
};

// See [Note: the end of a process] in worker.h: aborts the exchanges that are under way, and has
// all workers left.
void leave_pipelines(std::chrono::milliseconds timeout);

// Collective::exchange() over `backend`.
std::unique_ptr<InFlight> exchange_messages(const c10::intrusive_ptr<c10d::Backend>& backend,
                                            std::vector<Message> received,
                                            std::vector<Message> sent, int tag,
                                            std::shared_ptr<ExchangeThreads> threads);

}  // namespace fastsync::comm
