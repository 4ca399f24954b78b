#include "fault/fault_events.h"

#include <algorithm>
#include <iterator>

#include "check.h"
#include "comm/words.h"

namespace fastsync::engine {
namespace {

using comm::put_word;
using comm::take_word;

// "2.3 s".
std::string tenths(int64_t milliseconds) {
  return concat(milliseconds / 1000, ".", milliseconds / 100 % 10, " s");
}

// Empty where there is none.
std::string named(const Names& names, int64_t index) {
  return index >= 0 && index < static_cast<int64_t>(names.size())
             ? names[static_cast<size_t>(index)]
             : "";
}

std::string of_backward(const ProgressSnapshot& at, const Names& names) {
  if (at.buckets == 0) return "";
  const std::string name = named(names, at.param);
  return concat(name.empty() ? "" : concat(", last gradient '", name, "'"), ", ", at.bucket, " of ",
                at.buckets, " buckets sent");
}

std::string place_of(const ProgressSnapshot& at, const Names& names) {
  const int64_t step = at.step + 1;
  switch (static_cast<Phase>(at.phase)) {
    case Phase::kForward:
      return concat("in the forward of step ", step);
    case Phase::kAfterForward:
      return concat("between forward and backward of step ", step);
    case Phase::kBackward:
      return concat("in the backward of step ", step, of_backward(at, names));
    case Phase::kWrapping:
      return "where the model is wrapped";
    case Phase::kWaiting:
      return concat("in step ", step, ", in bucket ", at.bucket, " of ", at.buckets);
    case Phase::kMeeting:
      return concat("before step ", step,
                    ", where it waits for the others to train the same parameters");
    case Phase::kPlanning:
      return concat("after step ", at.step, ", where buckets are planned");
    case Phase::kGathering:
      return concat("after step ", at.step, ", gathering parameters");
    case Phase::kGatheringUnit:
      return concat("in step ", step, ", gathering ", named(names, at.bucket));
    case Phase::kReducingUnit:
      return concat("in step ", step, ", reducing ", named(names, at.bucket));
    case Phase::kComparing:
      return concat("after step ", at.step, ", comparing what all ranks should have");
    case Phase::kTogether:
      return "waiting for the other ranks";
    default:
      return at.step == 0 ? "before the first step" : concat("after step ", at.step);
  }
}

}  // namespace

std::string activity(const ProgressSnapshot& at, const Names& names) {
  const std::string place = place_of(at, names);
  return codes_long(at) ? concat(place, "; its codec has been at work for ", tenths(at.coding))
                        : place;
}

const char* name_of(int64_t phase) {
  switch (static_cast<Phase>(phase)) {
    case Phase::kForward:
      return "forward";
    case Phase::kAfterForward:
      return "after forward";
    case Phase::kBackward:
      return "backward";
    case Phase::kWrapping:
      return "wrapping";
    case Phase::kWaiting:
    case Phase::kTogether:
      return "waiting";
    case Phase::kMeeting:
    case Phase::kPlanning:
      return "planning";
    case Phase::kGathering:
    case Phase::kGatheringUnit:
      return "gathering";
    case Phase::kReducingUnit:
      return "reducing";
    case Phase::kComparing:
      return "comparing";
    default:
      return "between steps";
  }
}

const char* remedy_for(FaultEvent::Kind kind, bool joins) {
  switch (kind) {
    case FaultEvent::Kind::kDied:
      return "Look at what it printed, and in the system's log for the out-of-memory killer; then "
             "restart from a checkpoint";
    case FaultEvent::Kind::kLost:
      return "Look at its machine, and at the network to it; then restart from a checkpoint";
    case FaultEvent::Kind::kRaised:
      return "Mend that error: it is the cause, and those of the other ranks follow from it";
    case FaultEvent::Kind::kEnded:
      return joins ? "Give every rank as many steps, or train within model.join()"
                   : "Give every rank as many steps";
    case FaultEvent::Kind::kGaveUp:
      return "The cause is what that rank says";
    default:
      return "Find out what it waits for; the timeout of init_process_group() says how long others "
             "wait for it";
  }
}

std::vector<int64_t> causes_of(const FaultEvent& event, int64_t hearer) {
  std::vector<int64_t> causes;
  std::copy_if(event.causes.begin(), event.causes.end(), std::back_inserter(causes),
               [hearer](int64_t rank) { return rank != hearer; });
  return causes.empty() ? std::vector<int64_t>{event.about} : causes;
}

namespace {

// "in step 6", or "after step 5" where the step has ended.
std::string step_of(const ProgressSnapshot& at) {
  switch (static_cast<Phase>(at.phase)) {
    case Phase::kBetweenSteps:
    case Phase::kPlanning:
    case Phase::kGathering:
    case Phase::kComparing:
      return concat("after step ", at.step);
    default:
      return concat("in step ", at.step + 1);
  }
}

// Returns the position of a rank that others report on, and the age of its own last report if that
// matters.
std::string reported(const FaultEvent& event, const ProgressSnapshot* at, const Names& names,
                     const ProgressSnapshot* mine) {
  if (at == nullptr) return "";
  const std::string then = activity(*at, names);
  const std::string earlier = concat(tenths(event.age), " earlier");
  if (mine != nullptr && at->step < mine->step) {
    return concat(" ", step_of(*mine), " (", earlier, " it was ", then, ")");
  }
  constexpr int64_t kRecent = 1000;  // milliseconds: ten heartbeats
  return event.age < kRecent ? concat(" ", then) : concat(" ", then, ", as it said ", earlier);
}

}  // namespace

std::string describe(const FaultEvent& event, const ProgressSnapshot* at, const Names& names,
                     const ProgressSnapshot* mine) {
  const std::string where = at == nullptr ? "" : concat(" ", activity(*at, names));
  const std::string rank = concat("rank ", event.about);
  switch (event.kind) {
    case FaultEvent::Kind::kEnded:
      return concat(rank, " ended its script", where);
    case FaultEvent::Kind::kRaised:
      return concat(rank, " raised ", event.text, where);
    case FaultEvent::Kind::kGaveUp:
      return concat(rank, " gave up", where, ": ", event.text);
    case FaultEvent::Kind::kLost:
    case FaultEvent::Kind::kDied:
      return concat(rank, " ", event.text, reported(event, at, names, mine));
    case FaultEvent::Kind::kSilent:
      return concat(rank, " ", event.text.empty() ? "does not answer" : event.text,
                    reported(event, at, names, mine));
    default:
      return concat(rank, " is late: it is", where.empty() ? " not there yet" : where);
  }
}

// -- messages --

namespace {

std::string encode(const std::vector<ProgressSnapshot>& progress) {
  std::string bytes;
  put_word(bytes, static_cast<int64_t>(progress.size()));
  for (const ProgressSnapshot& each : progress) {
    for (const int64_t value : {each.step, each.phase, each.bucket, each.buckets, each.param,
                                each.issued, each.coding, each.kinds}) {
      put_word(bytes, value);
    }
  }
  return bytes;
}

std::vector<ProgressSnapshot> take_progress(const std::string& bytes, size_t& at) {
  std::vector<ProgressSnapshot> result;
  for (int64_t left = take_word(bytes, at); left > 0 && at < bytes.size(); --left) {
    ProgressSnapshot each;
    for (int64_t* value : {&each.step, &each.phase, &each.bucket, &each.buckets, &each.param,
                           &each.issued, &each.coding, &each.kinds}) {
      *value = take_word(bytes, at);
    }
    result.push_back(each);
  }
  return result;
}

}  // namespace

Heartbeat decode_heartbeat(const std::string& bytes) {
  size_t at = 0;
  Heartbeat heartbeat;
  heartbeat.progress = take_progress(bytes, at);
  while (at < bytes.size()) {
    const auto size = static_cast<size_t>(take_word(bytes, at));
    heartbeat.step_timings.push_back(bytes.substr(at, size));
    at += heartbeat.step_timings.back().size();
  }
  return heartbeat;
}

std::string encode(const Heartbeat& heartbeat) {
  std::string bytes = encode(heartbeat.progress);
  for (const std::string& step_timing : heartbeat.step_timings) {
    put_word(bytes, static_cast<int64_t>(step_timing.size()));
    bytes += step_timing;
  }
  return bytes;
}

std::string encode(const FaultEvent& event) {
  std::string bytes;
  for (const int64_t value :
       {static_cast<int64_t>(event.kind), event.about, event.model, event.issued, event.age}) {
    put_word(bytes, value);
  }
  bytes += encode(event.progress);
  put_word(bytes, static_cast<int64_t>(event.causes.size()));
  for (const int64_t rank : event.causes) put_word(bytes, rank);
  return bytes + event.text;
}

FaultEvent decode_event(const std::string& bytes) {
  size_t at = 0;
  FaultEvent event;
  event.kind = static_cast<FaultEvent::Kind>(take_word(bytes, at));
  event.about = take_word(bytes, at);
  event.model = take_word(bytes, at);
  event.issued = take_word(bytes, at);
  event.age = take_word(bytes, at);
  event.progress = take_progress(bytes, at);
  for (int64_t left = take_word(bytes, at); left > 0 && at < bytes.size(); --left) {
    event.causes.push_back(take_word(bytes, at));
  }
  event.text = bytes.substr(std::min(at, bytes.size()));
  return event;
}

// -- expected collectives --

namespace {

// kPlanning and kComparing do not count: there a rank is on its way to a place of Python, or waits
// in it.
bool waits_in(int64_t phase) {
  switch (static_cast<Phase>(phase)) {
    case Phase::kWaiting:
    case Phase::kGathering:
    case Phase::kGatheringUnit:
    case Phase::kReducingUnit:
    case Phase::kTogether:
      return true;
    default:
      return false;
  }
}

bool is_busy(const ProgressSnapshot& at) {
  return static_cast<Phase>(at.phase) != Phase::kBetweenSteps;
}

}  // namespace

bool is_counted(const ExpectedCollective& expected) {
  return (expected.bucket >= 0 || expected.issued > 0) && expected.issued != kUncounted;
}

bool expects(const ExpectedCollective& expected, int64_t rank) {
  const auto& ranks = expected.ranks;
  return ranks.empty() || std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

bool lacks(const FaultEvent& event, const ExpectedCollective& expected) {
  return expected.model >= event.progress.size() ||
         event.progress[expected.model].issued < expected.issued;
}

bool codes_long(const FaultEvent& event, const ExpectedCollective& expected) {
  return expected.model < event.progress.size() && codes_long(event.progress[expected.model]);
}

// A rank that is expected in a place of Python wraps a model, or is in a step of one.
const ProgressSnapshot* progress_of(const FaultEvent& event, size_t& model) {
  const std::vector<ProgressSnapshot>& all = event.progress;
  if (model >= all.size()) return nullptr;
  if (model != kWaitScopes || is_busy(all[kWaitScopes])) return &all[model];
  const auto busy = std::find_if(all.rbegin(), all.rend(), is_busy);
  const auto found = busy == all.rend() ? all.rbegin() : busy;
  model = static_cast<size_t>(all.rend() - found) - 1;
  return &all[model];
}

bool waits(const FaultEvent& event, const ExpectedCollective& expected) {
  const std::vector<ProgressSnapshot>& all = event.progress;
  if (!all.empty() && waits_in(all[kWaitScopes].phase)) return true;
  size_t model = expected.model;
  const ProgressSnapshot* at = progress_of(event, model);
  return at != nullptr && waits_in(at->phase);
}

}  // namespace fastsync::engine
