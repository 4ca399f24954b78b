#include "reducer/timeline.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "check.h"

namespace fastsync::engine {
namespace {

using Anchor = Origin<c10::Event>::Anchor;

constexpr int64_t kUnknown = INT64_MIN;
constexpr std::chrono::milliseconds kPause{1};  // between two looks at unreached marks

int64_t host_time() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

c10::Event timing_event(c10::Device device) {
  return c10::Event(device.type(), c10::EventFlag::BACKEND_DEFAULT);
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
  const c10::impl::VirtualGuardImpl backend(device_.type());
  quiet_ = backend.getStreamFromGlobalPool(device_, /*isHighPriority=*/true);
}

void Timeline::begin_step(int64_t step) {
  step_.store(step, std::memory_order_relaxed);
  if (!quiet_) return;
  const auto event = std::make_shared<c10::Event>(timing_event(device_));
  const int64_t now = host_time();
  event->record(*quiet_);
  const std::lock_guard<std::mutex> lock(device_mutex_);
  const Anchor before = origin_ ? origin_->own : Anchor{};
  origin_ = std::make_shared<Origin<c10::Event>>(Origin<c10::Event>{{event, now}, before});
}

void Timeline::record(Mark mark, int64_t index, int64_t bytes) {
  write(step_.load(std::memory_order_relaxed), mark, index, bytes);
}

std::function<void()> Timeline::on_done(int64_t index, Mark mark) {
  const int64_t step = step_.load(std::memory_order_relaxed);
  return [self = shared_from_this(), step, index, mark] { self->write(step, mark, index, 0); };
}

// A reader that sees any store after the first one also sees the first: no torn mark goes
// unnoticed.
void Timeline::write(int64_t step, Mark mark, int64_t index, int64_t bytes) {
  const uint64_t number = recorded_.fetch_add(1, std::memory_order_relaxed);
  Entry& entry = ring_[number % ring_.size()];
  const int64_t time = quiet_ ? kUnknown : host_time();
  entry.sequence.store(0, std::memory_order_relaxed);
  entry.mark.store(static_cast<uint64_t>(mark), std::memory_order_release);
  entry.step.store(step, std::memory_order_release);
  entry.index.store(index, std::memory_order_release);
  entry.bytes.store(bytes, std::memory_order_release);
  entry.time.store(time, std::memory_order_release);
  if (quiet_) record_on_stream(entry);
  entry.sequence.store(number + 1, std::memory_order_release);
}

void Timeline::record_on_stream(Entry& entry) {
  const c10::Stream current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  const std::lock_guard<std::mutex> lock(device_mutex_);
  // A reader may have looked up the former mark's time since.
  entry.time.store(kUnknown, std::memory_order_relaxed);
  entry.origin = origin_;
  if (!entry.event) entry.event = timing_event(device_);
  entry.event->record(current);
}

// Looks up the time of a mark. False: it has been overwritten, or the device has not reached it.
bool Timeline::look_up(Entry& entry, uint64_t sequence) const {
  if (!quiet_) return true;
  const std::lock_guard<std::mutex> lock(device_mutex_);
  if (entry.sequence.load(std::memory_order_relaxed) != sequence) return false;
  if (entry.time.load(std::memory_order_relaxed) != kUnknown) return true;
  if (!entry.origin) return false;
  const std::optional<int64_t> time = host_time_of(*entry.origin, *entry.event);
  if (!time) return false;
  entry.time.store(*time, std::memory_order_relaxed);
  entry.origin.reset();
  return true;
}

bool Timeline::read(uint64_t sequence, TimelineEvent& event) const {
  Entry& entry = ring_[(sequence - 1) % ring_.size()];
  if (entry.sequence.load(std::memory_order_acquire) != sequence) return false;
  if (!look_up(entry, sequence)) return false;
  event.mark = static_cast<Mark>(entry.mark.load(std::memory_order_acquire));
  event.step = entry.step.load(std::memory_order_acquire);
  event.index = entry.index.load(std::memory_order_acquire);
  event.bytes = entry.bytes.load(std::memory_order_acquire);
  event.time = entry.time.load(std::memory_order_acquire);
  return entry.sequence.load(std::memory_order_relaxed) == sequence;
}

std::vector<TimelineEvent> Timeline::events() const {
  const uint64_t end = recorded_.load(std::memory_order_relaxed);
  std::vector<TimelineEvent> events;
  events.reserve(end - first_kept(end));
  for (uint64_t number = first_kept(end); number < end; ++number) {
    TimelineEvent event;
    if (read(number + 1, event)) events.push_back(event);
  }
  return events;
}

int64_t Timeline::unfinished_events() const {
  const uint64_t end = recorded_.load(std::memory_order_relaxed);
  int64_t left = 0;
  for (uint64_t number = first_kept(end); number < end; ++number) {
    TimelineEvent event;
    if (!read(number + 1, event)) ++left;
  }
  return left;
}

int64_t Timeline::await_events(std::chrono::milliseconds time) const {
  const auto end = std::chrono::steady_clock::now() + time;
  int64_t left = unfinished_events();
  while (left > 0 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(kPause);
    left = unfinished_events();
  }
  return left;
}

int64_t Timeline::dropped() const {
  const auto recorded = static_cast<int64_t>(recorded_.load(std::memory_order_relaxed));
  return std::max<int64_t>(0, recorded - static_cast<int64_t>(ring_.size()));
}

}  // namespace fastsync::engine
