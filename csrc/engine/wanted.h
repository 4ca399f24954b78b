// What a rank waits for, and what news of another rank say of that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "news.h"

namespace fastsync::engine {

// The number of the model that stands for Python, which brings all ranks together in the same
// order.
constexpr size_t kPlaces = 0;
// Collectives that nobody has issued: whoever has ended lacks them, and nobody is late for them.
constexpr int64_t kUncounted = std::numeric_limits<int64_t>::max();

struct Wanted {
  size_t model = 0;
  int64_t issued = 0;  // the collectives that a rank must have issued
  int64_t bucket = -1;
  std::string place;  // "bucket 3 of 9 (...)", "the gather of unit 'blocks.3' (...)"
  std::vector<std::string> parameters;
  bool joins = true;             // the model has join()
  std::vector<int64_t> ranks{};  // that are waited for; empty: all
};

// When a rank that waits warns of the others.
struct Patience {
  double next = 0;     // seconds of waiting
  bool asked = false;  // who is late
  double last_asked =
      0;  // seconds at which it was asked for the last time before the timeout; 0: not yet
};

// Whether a rank can say that it has not issued this.
bool is_counted(const Wanted& wanted);
// Whether this rank is waited for.
bool wants(const Wanted& wanted, int64_t rank);
// Whether a rank of which these news are may not have issued the collective. One that has never
// made the model has not.
bool lacks(const News& news, const Wanted& wanted);
// Whether a codec of its user's has been at work for long, on something that it has issued.
bool codes_long(const News& news, const Wanted& wanted);
// Whether it waits for others.
bool waits(const News& news, const Wanted& wanted);
// What it does while others wait for it in `model`, which becomes the model that tells that. Null:
// nobody knows.
const Standing* standing_of(const News& news, size_t& model);

}  // namespace fastsync::engine
