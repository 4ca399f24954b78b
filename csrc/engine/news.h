// What ranks tell each other of faults, and how it travels.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "progress.h"

namespace fastsync::engine {

struct News {
  enum class Kind : int64_t {
    // A rank has ended: its script has, by an exception of its own, by an error that others have
    // caused, or without a word.
    kEnded,
    kRaised,
    kGaveUp,
    kLost,  // for all that can be told: its machine acknowledges nothing
    kDied,
    kAlive,   // it has not: only a connection was lost
    kAsked,   // who has not issued this collective?
    kLate,    // this rank has not
    kSilent,  // that one has not, and does not speak
  };

  Kind kind = Kind::kEnded;
  int64_t about = -1;  // a rank
  int64_t model = 0;   // that was asked for, and the number of collectives
  int64_t issued = 0;
  std::vector<Standing> standings;  // of that rank's models
  std::string text;
  std::vector<int64_t> blames{};  // of one that gave up: ranks that it names
  int64_t age{};  // milliseconds from `standings` to the end that others have noticed
};

// What neighbours tell each other ten times a second.
struct Beat {
  std::vector<Standing> standings;  // of a rank's models
  std::vector<std::string> paces;   // of pace boards, by model
};

// Whether a codec of the user's has been at work for so long that others may wait for it alone.
inline bool codes_long(const Standing& at) {
  constexpr int64_t kLong = 300;  // milliseconds
  return at.coding >= kLong;
}

inline bool is_end(News::Kind kind) { return kind <= News::Kind::kDied; }
// Of an end: others tell of it.
inline bool is_hearsay(News::Kind kind) {
  return kind == News::Kind::kLost || kind == News::Kind::kDied;
}

std::string encode(const News& news);
std::string encode(const Beat& beat);
// Of bytes that are cut off, what there is.
News decode_news(const std::string& bytes);
Beat decode_beat(const std::string& bytes);

// The names of a model's parameters.
using Names = std::vector<std::string>;

// "rank 2 was killed by SIGKILL in the backward of step 812, last gradient 'fc.weight', 3 of 9
// buckets sent". `at`: where it stands; null: it is not known. `mine`: where this rank stands in
// the same model; null: likewise. A rank that others speak for may have gone on after its last
// report: it cannot be in an earlier step than this rank.
std::string describe(const News& news, const Standing* at, const Names& names,
                     const Standing* mine);
// The end of that: "in the backward of step 812, ...".
std::string activity(const Standing& at, const Names& names);
// "forward", "backward", ...
const char* name_of(int64_t phase);
// The ranks to blame, as `hearer` sees it. Who gave up waited in vain for those that it names,
// perhaps for the hearer.
std::vector<int64_t> causes_of(const News& news, int64_t hearer);
// What to do about it, for the first of those that are to blame. `joins`: the model has join().
const char* remedy_for(News::Kind kind, bool joins);

}  // namespace fastsync::engine
