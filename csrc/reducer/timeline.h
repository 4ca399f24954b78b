// The times at which each bucket was ready, packed, launched and done, step by step: a preallocated
// ring of marks.
//
// A mark costs a reading of the clock and five stores, without a lock or an allocation. For a model
// on a device it is one event on the stream ([Note: device time]). Any thread may record: "done"
// comes from the backend's own threads.
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

#include "fault/device_clock.h"

namespace fastsync::engine {

enum class Mark : uint8_t {
  // of a step
  kForwardStart,
  kForwardEnd,
  kBackwardStart,
  kBackwardEnd,  // of the gradients' computation
  kStepEnd,      // all averages have arrived
  // of a bucket
  kReady,     // its last gradient has arrived
  kPacked,    // its buffer is filled, or the first piece of it
  kLaunched,  // the buffer, or that piece, is handed to the backend
  kDone,      // its collective has completed, awaited or not
  // of a unit's gather, of the reduction of its gradients, and of their sum over replicas: handed
  // to the backend, completed, needed by the computation, available to it
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
  // Keeps the latest `capacity` marks. `device`: of the model.
  Timeline(size_t capacity, c10::Device device);
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // Starts a step: later marks belong to it. Must not be called while a device's work is captured.
  void begin_step(int64_t step);
  // From any thread.
  void record(Mark mark, int64_t index, int64_t bytes = 0);
  // Returns a function that records `mark` of a bucket or unit of this step. It is called once,
  // later, from any thread, and keeps the timeline alive.
  std::function<void()> on_done(int64_t index, Mark mark);

  // Returns the kept marks, oldest first, without those that are being written or that the device
  // has not reached.
  std::vector<TimelineEvent> events() const;
  // Waits until the device has reached all marks, at most for `time`: a collective may wait for a
  // rank that is gone. Returns how many it has not reached.
  int64_t await_events(std::chrono::milliseconds time) const;
  // Returns the number of overwritten marks.
  int64_t dropped() const;

 private:
  struct Entry {
    std::atomic<uint64_t> sequence{0};  // number of the mark, from 1; 0: being written
    std::atomic<uint64_t> mark{0};
    std::atomic<int64_t> step{0};
    std::atomic<int64_t> index{0};
    std::atomic<int64_t> bytes{0};
    std::atomic<int64_t> time{0};
    // On devices, under device_mutex_: the source of the time, which is looked up once.
    std::optional<c10::Event> event;
    std::shared_ptr<const Origin<c10::Event>> origin;
  };

  void write(int64_t step, Mark mark, int64_t index, int64_t bytes);
  bool read(uint64_t sequence, TimelineEvent& event) const;
  void record_on_stream(Entry& entry);
  bool look_up(Entry& entry, uint64_t sequence) const;
  int64_t unfinished_events() const;
  uint64_t first_kept(uint64_t end) const { return end > ring_.size() ? end - ring_.size() : 0; }

  const c10::Device device_;
  mutable std::vector<Entry> ring_;  // times are looked up when read
  std::atomic<uint64_t> recorded_{0};
  std::atomic<int64_t> step_{0};
  mutable std::mutex device_mutex_;
  std::optional<c10::Stream> quiet_;                  // of origins; none on a CPU
  std::shared_ptr<const Origin<c10::Event>> origin_;  // of this step; under device_mutex_
};

}  // namespace fastsync::engine
