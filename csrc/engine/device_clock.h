// When a device came to its events, on the host's steady clock.
//
// [Note: device time]
// A host runs ahead of its device, so a mark there is an event on the current stream, whose time is
// looked up when the marks are read. Devices tell the time between two events alone, as fp32
// milliseconds, by a clock that drifts from the host's. So every step has an origin of its own: an
// event on a stream that nothing else is put on, just after the host's clock has been read. The
// device comes to it at once, and marks are counted from it: 10 s later fp32 still resolves a
// microsecond, and clocks that differ by 50 parts in a million are half a millisecond apart.
//
// Torch has no streams that are nobody else's, so that an origin can be late, and what is counted
// from it early. The device cannot have come to an origin before the host recorded it; so of an
// origin and the one before it the one that says the later time is right, where they are so close
// that clocks have not drifted apart.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>

namespace fastsync::engine {

// `Event` is torch's, or has its query() and elapsedTime(), in milliseconds.
template <class Event>
struct Origin {
  struct Anchor {
    std::shared_ptr<const Event> event;  // null: none
    int64_t host = 0;                    // nanoseconds, read just before it was recorded
  };
  Anchor own;
  Anchor before;  // that of the origin before it
};

// Apart by more than that, the drift of the clocks is more than an origin is late, as a rule.
constexpr double kNearMs = 1000.0;

inline int64_t nanoseconds(double ms) { return std::llround(ms * 1e6); }

// Of `event`, recorded after `origin` by a thread that had it; none where the device has not come
// to it, or to the origin.
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
