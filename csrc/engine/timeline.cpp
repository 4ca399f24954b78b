#include "timeline.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>

#include "../check.h"

namespace fastsync::engine {
namespace {

int64_t host_time() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

c10::Event timing_event(c10::Device device) {
  return c10::Event(device.type(), c10::EventFlag::BACKEND_DEFAULT);
}

void record_now(c10::Event& event, c10::Device device) {
  event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

}  // namespace

const char* to_string(Mark mark) {
  switch (mark) {
    case Mark::kForwardStart:
      return "forward_start";
    case Mark::kForwardEnd:
      return "forward_end";
    case Mark::kBackwardStart:
      return "backward_start";
    case Mark::kBackwardEnd:
      return "backward_end";
    case Mark::kStepEnd:
      return "step_end";
    case Mark::kReady:
      return "ready";
    case Mark::kPacked:
      return "packed";
    case Mark::kLaunched:
      return "launched";
    case Mark::kDone:
      return "done";
    case Mark::kGatherStarted:
      return "gather_started";
    case Mark::kGatherDone:
      return "gather_done";
    case Mark::kGatherWanted:
      return "gather_wanted";
    case Mark::kGatherArrived:
      return "gather_arrived";
    case Mark::kReductionStarted:
      return "reduction_started";
    case Mark::kReductionDone:
      return "reduction_done";
    case Mark::kReductionWanted:
      return "reduction_wanted";
    case Mark::kReductionArrived:
      return "reduction_arrived";
    case Mark::kSumStarted:
      return "sum_started";
    case Mark::kSumDone:
      return "sum_done";
    case Mark::kSumWanted:
      return "sum_wanted";
    case Mark::kSumArrived:
      return "sum_arrived";
  }
  return "unknown";
}

Timeline::Timeline(size_t capacity, c10::Device device) : device_(device), ring_(capacity) {
  FS_CHECK_VALUE(capacity > 0, "a timeline must hold at least one mark");
  if (device_.is_cpu()) return;
  origin_ = timing_event(device_);
  record_now(*origin_, device_);
  origin_->synchronize();
  origin_time_ = host_time();
}

void Timeline::record(Mark mark, int64_t index, int64_t bytes) {
  write(step_.load(std::memory_order_relaxed), mark, index, bytes);
}

std::function<void()> Timeline::on_done(int64_t index, Mark mark) {
  const int64_t step = step_.load(std::memory_order_relaxed);
  return [self = shared_from_this(), step, index, mark] { self->write(step, mark, index, 0); };
}

// A reader that sees any store after the first one also sees the first: no torn mark goes unnoticed.
void Timeline::write(int64_t step, Mark mark, int64_t index, int64_t bytes) {
  const uint64_t number = recorded_.fetch_add(1, std::memory_order_relaxed);
  Entry& entry = ring_[number % ring_.size()];
  const int64_t time = device_.is_cpu() ? host_time() : 0;
  entry.sequence.store(0, std::memory_order_relaxed);
  entry.mark.store(static_cast<uint64_t>(mark), std::memory_order_release);
  entry.step.store(step, std::memory_order_release);
  entry.index.store(index, std::memory_order_release);
  entry.bytes.store(bytes, std::memory_order_release);
  entry.time.store(time, std::memory_order_release);
  if (origin_) record_on_stream(entry);
  entry.sequence.store(number + 1, std::memory_order_release);
}

void Timeline::record_on_stream(Entry& entry) {
  const std::lock_guard<std::mutex> lock(device_mutex_);
  if (!entry.event) entry.event = timing_event(device_);
  record_now(*entry.event, device_);
}

bool Timeline::time_of(const Entry& entry, int64_t& time) const {
  if (!origin_) return true;
  const std::lock_guard<std::mutex> lock(device_mutex_);
  if (!entry.event || !entry.event->query()) return false;
  time = origin_time_ + static_cast<int64_t>(origin_->elapsedTime(*entry.event) * 1e6);
  return true;
}

bool Timeline::read(uint64_t sequence, TimelineEvent& event) const {
  const Entry& entry = ring_[(sequence - 1) % ring_.size()];
  if (entry.sequence.load(std::memory_order_acquire) != sequence) return false;
  event.mark = static_cast<Mark>(entry.mark.load(std::memory_order_acquire));
  event.step = entry.step.load(std::memory_order_acquire);
  event.index = entry.index.load(std::memory_order_acquire);
  event.bytes = entry.bytes.load(std::memory_order_acquire);
  event.time = entry.time.load(std::memory_order_acquire);
  return time_of(entry, event.time) && entry.sequence.load(std::memory_order_relaxed) == sequence;
}

std::vector<TimelineEvent> Timeline::events() const {
  const uint64_t end = recorded_.load(std::memory_order_relaxed);
  const uint64_t begin = end > ring_.size() ? end - ring_.size() : 0;
  std::vector<TimelineEvent> events;
  events.reserve(end - begin);
  for (uint64_t number = begin; number < end; ++number) {
    TimelineEvent event;
    if (read(number + 1, event)) events.push_back(event);
  }
  return events;
}

int64_t Timeline::dropped() const {
  const auto recorded = static_cast<int64_t>(recorded_.load(std::memory_order_relaxed));
  return std::max<int64_t>(0, recorded - static_cast<int64_t>(ring_.size()));
}

}  // namespace fastsync::engine
