// Converts the times of a device's events to the host's steady clock.
//
// [Note: device time]
// The host runs ahead of its device. So a mark on a device is an event on the current stream, and
// its time is looked up when the marks are read. Devices only report the time between two events,
// as fp32 milliseconds, by a clock that drifts from the host's. So every step has an origin of its
// own: an event on an otherwise unused stream, recorded just after the host's clock has been read.
// The device reaches it at once, and the times of marks count from it: 10 s later fp32 still
// resolves a microsecond, and clocks that differ by 50 parts in a million are half a millisecond
// apart.
//
// Torch has no private streams, so the device may reach an origin late; times counted from it are
// then too early. But the device cannot reach an origin before the host records it. So of an origin
// and the one before it, the one that yields the later time is right, if the two are so close that
// the clocks have not drifted apart.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>

namespace fastsync::engine {

// `Event` is c10::Event, or has its query() and elapsedTime(), in milliseconds.
template <class Event>
struct Origin {
  struct Anchor {
    std::shared_ptr<const Event> event;  // null: none
    int64_t host = 0;                    // nanoseconds, read just before it was recorded
  };
  Anchor own;
  Anchor before;  // that of the origin before it
};

// If two origins are further apart, the drift of the clocks usually exceeds the lateness of an
// origin.
constexpr double kNearMs = 1000.0;

inline int64_t nanoseconds(double ms) { return std::llround(ms * 1e6); }

// Returns the host's time of `event`, which a thread recorded after it had `origin`; none if the
// device has not reached the event or the origin.
template <class Event>
std::optional<int64_t> host_time_of(const Origin<Event>& origin, const Event& event) {
  const auto& [own, before] = origin;
  if (!own.event || !own.event->query() || !event.query()) return std::nullopt;
  int64_t start = own.host;
  if (before.event && before.event->query()) {
    const double apart = before.event->elapsedTime(*own.event);
    if (apart < kNearMs) start = std::max(start, before.host + nanoseconds(apart));
  }
  return start + nanoseconds(own.event->elapsedTime(event));
}

}  // namespace fastsync::engine
