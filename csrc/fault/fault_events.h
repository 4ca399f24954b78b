// The messages about faults between ranks, and their encoding.
#pragma once

#include <cstdint>
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

}  // namespace fastsync::engine
