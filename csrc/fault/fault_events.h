// The messages about faults between ranks, and their encoding; and the collective that a rank waits
// for, with its state on another rank according to that rank's fault event.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fault/progress.h"

namespace fastsync::engine {

struct FaultEvent {
  enum class Kind : int64_t {
    // A rank has ended: at the end of its script, by an exception of its own, by an error that
    // others have caused, or without a word.
    kEnded,
    kRaised,
    kGaveUp,
    kLost,  // presumably: its machine acknowledges nothing
    kDied,
    kAlive,   // the rank lives: only a connection was lost
    kAsked,   // which ranks have not issued this collective?
    kLate,    // the sending rank has not
    kSilent,  // another rank has not, and does not report
  };

  Kind kind = Kind::kEnded;
  int64_t about = -1;  // a rank
  int64_t model = 0;   // of the question, like the number of collectives
  int64_t issued = 0;
  std::vector<ProgressSnapshot> progress;  // of that rank's models
  std::string text;
  std::vector<int64_t> causes{};  // of a rank that gave up: the ranks that it names
  int64_t age{};                  // milliseconds from `progress` to the end as others noticed it
};

// The heartbeat that neighbours send each other ten times a second.
struct Heartbeat {
  std::vector<ProgressSnapshot> progress;  // of a rank's models
  std::vector<std::string> step_timings;   // of step timing boards, by model
};

// Whether a codec of the user's has been at work for so long that others may wait for it alone.
inline bool codes_long(const ProgressSnapshot& at) {
  constexpr int64_t kLong = 300;  // milliseconds
  return at.coding >= kLong;
}

inline bool is_end(FaultEvent::Kind kind) { return kind <= FaultEvent::Kind::kDied; }
// Whether the end is reported by a peer, not by the rank itself.
inline bool is_reported_by_peer(FaultEvent::Kind kind) {
  return kind == FaultEvent::Kind::kLost || kind == FaultEvent::Kind::kDied;
}

std::string encode(const FaultEvent& event);
std::string encode(const Heartbeat& heartbeat);
// Decodes a message; a truncated one as far as it goes.
FaultEvent decode_event(const std::string& bytes);
Heartbeat decode_heartbeat(const std::string& bytes);

// The names of a model's parameters.
using Names = std::vector<std::string>;

// "rank 2 was killed by SIGKILL in the backward of step 812, last gradient 'fc.weight', 3 of 9
// buckets sent". `at`: the position of that rank; null: not known. `mine`: the position of this
// rank in the same model; null: likewise. A rank that others report on may have gone on after its
// last report: it cannot be in an earlier step than this rank.
std::string describe(const FaultEvent& event, const ProgressSnapshot* at, const Names& names,
                     const ProgressSnapshot* mine);
// The last part of that: "in the backward of step 812, ...".
std::string activity(const ProgressSnapshot& at, const Names& names);
// "forward", "backward", ...
const char* name_of(int64_t phase);
// Returns the ranks to blame from `hearer`'s point of view. A rank that gave up waited in vain for
// the ranks that it names, perhaps for the hearer.
std::vector<int64_t> causes_of(const FaultEvent& event, int64_t hearer);
// Returns the remedy for the first of the ranks to blame. `joins`: the model has join().
const char* remedy_for(FaultEvent::Kind kind, bool joins);

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
