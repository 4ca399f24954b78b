// The collective that a rank waits for, and its state on another rank according to that rank's
// news.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fault/fault_events.h"

namespace fastsync::engine {

// The number of the model that stands for places where Python brings all ranks together, in the
// same order.
constexpr size_t kPlaces = 0;
// A number of collectives that no rank reaches: an ended rank lacks them, and no rank is late for
// them.
constexpr int64_t kUncounted = std::numeric_limits<int64_t>::max();

struct Wanted {
  size_t model = 0;
  int64_t issued = 0;  // the collectives that a rank must have issued
  int64_t bucket = -1;
  std::string place;  // "bucket 3 of 9 (...)", "the gather of unit 'blocks.3' (...)"
  std::vector<std::string> parameters;
  bool joins = true;             // the model has join()
  std::vector<int64_t> ranks{};  // the expected ones; empty: all
  bool sharded = false;          // the ranks share parameters: all must gather a whole tensor
};

// When a waiting rank warns of the others.
struct Patience {
  double next = 0;     // seconds of waiting
  bool asked = false;  // which ranks are late
  // Seconds of waiting at the last question, before the timeout; 0: not yet.
  double last_asked = 0;
};

// Whether ranks count this collective, so that one can say that it has not issued it.
bool is_counted(const Wanted& wanted);
// Whether `rank` is expected.
bool wants(const Wanted& wanted, int64_t rank);
// Whether the rank that `news` describes may not have issued the collective. A rank without the
// model has not.
bool lacks(const News& news, const Wanted& wanted);
// Whether a codec of the user has been running on that rank for long.
bool codes_long(const News& news, const Wanted& wanted);
// Whether that rank waits for others.
bool waits(const News& news, const Wanted& wanted);
// Returns the progress of that rank while others wait for it in `model`, and sets `model` to the
// model that it is about. Null: not known.
const Standing* standing_of(const News& news, size_t& model);

}  // namespace fastsync::engine
