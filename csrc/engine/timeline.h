// When each bucket was ready, packed, launched and done, step by step: a preallocated ring of
// marks.
//
// A mark costs a reading of the clock and five stores, or one event on the stream where the model
// is on a device ([Note: device time]); no lock and no allocation on the CPU. Any thread may
// record: "done" comes from the backend's own threads.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "device_clock.h"

namespace fastsync::engine {

enum class Mark : uint8_t {
  // of a step
  kForwardStart,
  kForwardEnd,
  kBackwardStart,
  kBackwardEnd,  // of the gradients' computation
  kStepEnd,      // all averages are there
  // of a bucket
  kReady,     // its last gradient has arrived
  kPacked,    // its buffer is filled, or the first piece of it that travels by itself
  kLaunched,  // that is handed to the backend
  kDone,      // its collective has completed, whether anyone waits for it or not
  // of a unit's gather, of the reduction of its gradients, and of their sum over replicas: handed
  // to the backend, completed, needed by the computation, and there
  kGatherStarted,
  kGatherDone,
  kGatherWanted,
  kGatherArrived,
  kReductionStarted,
  kReductionDone,
  kReductionWanted,
  kReductionArrived,
  kSumStarted,
  kSumDone,
  kSumWanted,
  kSumArrived,
};
const char* to_string(Mark mark);

struct TimelineEvent {
  int64_t step = 0;  // synchronised backwards before it
  Mark mark = Mark::kForwardStart;
  int64_t index = 0;  // the bucket or unit; for a step's mark, how many plans had been installed
  int64_t bytes =
      0;  // handed to the backend, with kLaunched; sent, where a unit's collective starts
  int64_t time = 0;  // steady clock, nanoseconds
};

class Timeline : public std::enable_shared_from_this<Timeline> {
 public:
  // `capacity` marks are kept, the latest ones. `device`: where the model is.
  Timeline(size_t capacity, c10::Device device);
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // What is recorded from now on belongs to this step. Not while a device's work is captured.
  void begin_step(int64_t step);
  // From any thread.
  void record(Mark mark, int64_t index, int64_t bytes = 0);
  // Records `mark` of a bucket or unit of this step when it is called: once, later, from any
  // thread. Keeps the timeline alive.
  std::function<void()> on_done(int64_t index, Mark mark);

  // The marks that are kept, oldest first; those that are being written are left out, and so are
  // those that their device has not come to, until it has.
  std::vector<TimelineEvent> events() const;
  // Waits until the device has come to all marks, for so long at most: a collective may wait for a
  // rank that has gone. Returns how many it has not come to.
  int64_t settle(std::chrono::milliseconds time) const;
  // Marks that were overwritten.
  int64_t dropped() const;

 private:
  struct Entry {
    std::atomic<uint64_t> sequence{0};  // number of the mark, from 1; 0: being written
    std::atomic<uint64_t> mark{0};
    std::atomic<int64_t> step{0};
    std::atomic<int64_t> index{0};
    std::atomic<int64_t> bytes{0};
    std::atomic<int64_t> time{0};
    // On devices, under device_mutex_: what the time is looked up from, once.
    std::optional<c10::Event> event;
    std::shared_ptr<const Origin<c10::Event>> origin;
  };

  void write(int64_t step, Mark mark, int64_t index, int64_t bytes);
  bool read(uint64_t sequence, TimelineEvent& event) const;
  void record_on_stream(Entry& entry);
  bool look_up(Entry& entry, uint64_t sequence) const;
  int64_t unsettled() const;
  uint64_t first_kept(uint64_t end) const { return end > ring_.size() ? end - ring_.size() : 0; }

  const c10::Device device_;
  mutable std::vector<Entry> ring_;  // whose times are looked up when they are read
  std::atomic<uint64_t> recorded_{0};
  std::atomic<int64_t> step_{0};
  mutable std::mutex device_mutex_;
  std::optional<c10::Stream> quiet_;                  // of origins; none on a CPU
  std::shared_ptr<const Origin<c10::Event>> origin_;  // of this step; under device_mutex_
};

}  // namespace fastsync::engine
