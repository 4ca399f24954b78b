// The collective that a rank waits for, and its state on another rank according to that rank's
// fault event.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fault/fault_events.h"

namespace fastsync::engine {

// The number of the model that stands for the wait scopes of Python, which all ranks enter in the
// same order.
constexpr size_t kWaitScopes = 0;
// A number of collectives that no rank reaches: an ended rank lacks them, and no rank is late for
// them.
constexpr int64_t kUncounted = std::numeric_limits<int64_t>::max();

struct ExpectedCollective {
  size_t model = 0;
  int64_t issued = 0;  // the collectives that a rank must have issued
  int64_t bucket = -1;
  std::string label;  // "bucket 3 of 9 (...)", "the gather of unit 'blocks.3' (...)"
  std::vector<std::string> parameters;
  bool joins = true;             // the model has join()
  std::vector<int64_t> ranks{};  // the expected ones; empty: all
  bool sharded = false;          // the ranks share parameters: all must gather a whole tensor
  bool in_order = false;         // the backend takes a collective for another one of the same size
};

// When a waiting rank warns of the others.
struct Backoff {
  double next = 0;     // seconds of waiting
  bool asked = false;  // which ranks are late
  // Seconds of waiting at the last question, before the timeout; 0: not yet.
  double last_asked = 0;
};

// Whether ranks count this collective, so that one can say that it has not issued it.
bool is_counted(const ExpectedCollective& expected);
// Whether `rank` is expected.
bool expects(const ExpectedCollective& expected, int64_t rank);
// Whether the rank that `event` describes may not have issued the collective. A rank without the
// model has not.
bool lacks(const FaultEvent& event, const ExpectedCollective& expected);
// Whether a codec of the user has been running on that rank for long.
bool codes_long(const FaultEvent& event, const ExpectedCollective& expected);
// Whether that rank waits for others.
bool waits(const FaultEvent& event, const ExpectedCollective& expected);
// Returns the progress of that rank while others wait for it in `model`, and sets `model` to the
// model that it is about. Null: not known.
const ProgressSnapshot* progress_of(const FaultEvent& event, size_t& model);

}  // namespace fastsync::engine
