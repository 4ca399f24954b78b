#include "fault/fault_events.h"

#include <algorithm>
#include <iterator>

#include "check.h"
#include "fault/wording.h"

namespace fastsync::engine {
namespace {

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

std::string of_backward(const Standing& at, const Names& names) {
  if (at.buckets == 0) return "";
  const std::string name = named(names, at.param);
  return concat(name.empty() ? "" : concat(", last gradient '", name, "'"), ", ", at.bucket, " of ",
                at.buckets, " buckets sent");
}

std::string place_of(const Standing& at, const Names& names) {
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

std::string activity(const Standing& at, const Names& names) {
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

const char* remedy_for(News::Kind kind, bool joins) {
  switch (kind) {
    case News::Kind::kDied:
      return "Look at what it printed, and in the system's log for the out-of-memory killer; then "
             "restart from a checkpoint";
    case News::Kind::kLost:
      return "Look at its machine, and at the network to it; then restart from a checkpoint";
    case News::Kind::kRaised:
      return "Mend that error: it is the cause, and those of the other ranks follow from it";
    case News::Kind::kEnded:
      return joins ? "Give every rank as many steps, or train within model.join()"
                   : "Give every rank as many steps";
    case News::Kind::kGaveUp:
      return "The cause is what that rank says";
    default:
      return "Find out what it waits for; the timeout of init_process_group() says how long others "
             "wait for it";
  }
}

std::vector<int64_t> causes_of(const News& news, int64_t hearer) {
  std::vector<int64_t> causes;
  std::copy_if(news.blames.begin(), news.blames.end(), std::back_inserter(causes),
               [hearer](int64_t rank) { return rank != hearer; });
  return causes.empty() ? std::vector<int64_t>{news.about} : causes;
}

namespace {

// "in step 6", or "after step 5" where the step has ended.
std::string step_of(const Standing& at) {
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
std::string reported(const News& news, const Standing* at, const Names& names,
                     const Standing* mine) {
  if (at == nullptr) return "";
  const std::string then = activity(*at, names);
  const std::string earlier = concat(tenths(news.age), " earlier");
  if (mine != nullptr && at->step < mine->step) {
    return concat(" ", step_of(*mine), " (", earlier, " it was ", then, ")");
  }
  constexpr int64_t kRecent = 1000;  // milliseconds: ten beats
  return news.age < kRecent ? concat(" ", then) : concat(" ", then, ", as it said ", earlier);
}

}  // namespace

std::string describe(const News& news, const Standing* at, const Names& names,
                     const Standing* mine) {
  const std::string where = at == nullptr ? "" : concat(" ", activity(*at, names));
  const std::string rank = concat("rank ", news.about);
  switch (news.kind) {
    case News::Kind::kEnded:
      return concat(rank, " ended its script", where);
    case News::Kind::kRaised:
      return concat(rank, " raised ", news.text, where);
    case News::Kind::kGaveUp:
      return concat(rank, " gave up", where, ": ", news.text);
    case News::Kind::kLost:
    case News::Kind::kDied:
      return concat(rank, " ", news.text, reported(news, at, names, mine));
    case News::Kind::kSilent:
      return concat(rank, " ", news.text.empty() ? "does not answer" : news.text,
                    reported(news, at, names, mine));
    default:
      return concat(rank, " is late: it is", where.empty() ? " not there yet" : where);
  }
}

// -- messages --

namespace {

std::string encode(const std::vector<Standing>& standings) {
  std::string bytes;
  put_word(bytes, static_cast<int64_t>(standings.size()));
  for (const Standing& each : standings) {
    for (const int64_t value : {each.step, each.phase, each.bucket, each.buckets, each.param,
                                each.issued, each.coding, each.kinds}) {
      put_word(bytes, value);
    }
  }
  return bytes;
}

std::vector<Standing> take_standings(const std::string& bytes, size_t& at) {
  std::vector<Standing> result;
  for (int64_t left = take_word(bytes, at); left > 0 && at < bytes.size(); --left) {
    Standing each;
    for (int64_t* value : {&each.step, &each.phase, &each.bucket, &each.buckets, &each.param,
                           &each.issued, &each.coding, &each.kinds}) {
      *value = take_word(bytes, at);
    }
    result.push_back(each);
  }
  return result;
}

}  // namespace

Beat decode_beat(const std::string& bytes) {
  size_t at = 0;
  Beat beat;
  beat.standings = take_standings(bytes, at);
  while (at < bytes.size()) {
    const auto size = static_cast<size_t>(take_word(bytes, at));
    beat.paces.push_back(bytes.substr(at, size));
    at += beat.paces.back().size();
  }
  return beat;
}

std::string encode(const Beat& beat) {
  std::string bytes = encode(beat.standings);
  for (const std::string& pace : beat.paces) {
    put_word(bytes, static_cast<int64_t>(pace.size()));
    bytes += pace;
  }
  return bytes;
}

std::string encode(const News& news) {
  std::string bytes;
  for (const int64_t value :
       {static_cast<int64_t>(news.kind), news.about, news.model, news.issued, news.age}) {
    put_word(bytes, value);
  }
  bytes += encode(news.standings);
  put_word(bytes, static_cast<int64_t>(news.blames.size()));
  for (const int64_t rank : news.blames) put_word(bytes, rank);
  return bytes + news.text;
}

News decode_news(const std::string& bytes) {
  size_t at = 0;
  News news;
  news.kind = static_cast<News::Kind>(take_word(bytes, at));
  news.about = take_word(bytes, at);
  news.model = take_word(bytes, at);
  news.issued = take_word(bytes, at);
  news.age = take_word(bytes, at);
  news.standings = take_standings(bytes, at);
  for (int64_t left = take_word(bytes, at); left > 0 && at < bytes.size(); --left) {
    news.blames.push_back(take_word(bytes, at));
  }
  news.text = bytes.substr(std::min(at, bytes.size()));
  return news;
}

}  // namespace fastsync::engine
