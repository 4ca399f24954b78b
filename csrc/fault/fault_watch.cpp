#include "fault/fault_watch.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <iterator>
#include <numeric>
#include <set>
#include <thread>
#include <utility>

#include "check.h"
#include "fault/process.h"

namespace fastsync::engine {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kSilence{1500};  // of a neighbour's heartbeats
constexpr milliseconds kPause{5};
constexpr milliseconds kLauncherLooks{300};  // torchrun does ten times a second

milliseconds milliseconds_of(double seconds) { return milliseconds(std::llround(seconds * 1e3)); }

}  // namespace

FaultWatch::FaultWatch(const std::string& host, Options options, Interpreter interpreter)
    : options_(options),
      interpreter_(std::move(interpreter)),
      peers_(host, milliseconds_of(options.lost_after)),
      monitor_(device_listener()) {
  models_.push_back({wait_scopes_, {}, nullptr});
}

FaultWatch::~FaultWatch() {
  leave(Leaving::kEnds, "");
  close();
}

std::vector<int64_t> FaultWatch::connect(std::vector<Member> members, int64_t rank) {
  members_ = std::move(members);
  rank_ = rank;
  main_thread_ = pthread_self();
  std::vector<comm::PeerAddress> addresses;
  for (const Member& member : members_) addresses.push_back(member.address);
  for (const int64_t other :
       comm::Peers::neighbours_of(rank, static_cast<int64_t>(members_.size()))) {
    // A neighbour that never reports is silent from here on.
    neighbours_[other].heard = Clock::now();
  }
  comm::Peers::Listener listener;
  listener.heartbeat = [this] { return heartbeat(); };
  listener.on_heartbeat = [this](int64_t other, const std::string& heartbeat) {
    on_heartbeat(other, heartbeat);
  };
  listener.on_event = [this](const std::string& event) { on_event(event); };
  listener.on_closed = [this](int64_t other, bool lost) { on_closed(other, lost); };
  announce_termination(concat("fastsync: rank ", rank, " ends: SIGTERM\n"));
  return peers_.connect(addresses, rank, std::move(listener));
}

size_t FaultWatch::add(std::shared_ptr<const Progress> progress, Names names,
                       std::shared_ptr<StepTimingBoard> board) {
  const std::lock_guard<std::mutex> lock(mutex_);
  models_.push_back({std::move(progress), std::move(names), std::move(board)});
  return models_.size() - 1;
}

std::vector<ProgressSnapshot> FaultWatch::progress() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<ProgressSnapshot> all;
  for (const Model& model : models_) all.push_back(model.progress->now());
  return all;
}

std::string FaultWatch::heartbeat() const {
  Heartbeat heartbeat{progress(), {}};
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Model& model : models_) {
    heartbeat.step_timings.push_back(model.board ? model.board->encode() : "");
  }
  return encode(heartbeat);
}

void FaultWatch::on_heartbeat(int64_t rank, const std::string& bytes) {
  Heartbeat heartbeat = decode_heartbeat(bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < std::min(models_.size(), heartbeat.step_timings.size()); ++i) {
    if (models_[i].board) models_[i].board->merge(heartbeat.step_timings[i]);
  }
  neighbours_[rank] = {std::move(heartbeat.progress), Clock::now()};
}

void FaultWatch::on_closed(int64_t rank, bool lost) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    neighbours_[rank].closed = true;
  }
  find_end(rank, lost);
}

// Returns the milliseconds since the neighbour's last report.
int64_t FaultWatch::age_of(const Neighbour& neighbour) {
  return std::chrono::duration_cast<milliseconds>(Clock::now() - neighbour.heard).count();
}

// A process of this machine may only have lost a connection, or may end a moment after closing it.
void FaultWatch::find_end(int64_t rank, bool lost) {
  FaultEvent event{FaultEvent::Kind::kDied, rank, 0, 0, {}, "ended without a word"};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (left_ || ends_.count(rank) != 0) return;
    event.progress = neighbours_[rank].progress;
    event.age = age_of(neighbours_[rank]);
  }
  if (is_here(rank)) {
    const ProcessEnd end = end_of_process(members_[static_cast<size_t>(rank)].process);
    if (end.lives) return;
    if (!end.how.empty()) event.text = end.how;
  } else if (lost) {
    event.kind = FaultEvent::Kind::kLost;
    event.text = "was lost with its machine, or with the network to it,";
  }
  note(event);
  tell(event);
}

void FaultWatch::on_event(const std::string& bytes) {
  FaultEvent event = decode_event(bytes);
  if (event.kind == FaultEvent::Kind::kAsked) {
    hear_question(event);
  } else if (is_reported_by_peer(event.kind) && event.about == rank_) {
    tell({FaultEvent::Kind::kAlive, rank_, 0, 0, {}, ""});
  } else {
    note(std::move(event));
  }
}

// Reports this rank if it is behind or delayed by its codec. Reports silent neighbours, too,
// whatever they have issued: a stopped rank may not have sent its data.
void FaultWatch::answer(const FaultEvent& question) {
  const ExpectedCollective expected{
      static_cast<size_t>(question.model), question.issued, -1, "", {}};
  FaultEvent mine{FaultEvent::Kind::kLate, rank_, question.model, question.issued, progress(), ""};
  const bool codes = codes_long(mine, expected);
  if (is_counted(expected) && (codes || lacks(mine, expected)) && question.about != rank_) {
    mine.text = stack(codes ? coder_of(expected.model) : main_thread_);
    tell(mine);
  }
  std::vector<FaultEvent> silent;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [rank, neighbour] : neighbours_) {
      if (Clock::now() - neighbour.heard < kSilence || ends_.count(rank) != 0) continue;
      silent.push_back({FaultEvent::Kind::kSilent, rank, 0, 0, neighbour.progress, ""});
      silent.back().age = age_of(neighbour);
    }
  }
  for (FaultEvent& event : silent) {
    const int64_t process = members_[static_cast<size_t>(event.about)].process;
    if (is_here(event.about) && is_stopped(process)) event.text = "is stopped (SIGSTOP, SIGTSTP)";
    note(event);
    tell(std::move(event));
  }
}

void FaultWatch::tell(FaultEvent event) { peers_.flood(encode(event)); }

void FaultWatch::note(FaultEvent event) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t rank = event.about;
  if (event.kind == FaultEvent::Kind::kAlive) {
    ends_.erase(rank);
  } else if (is_end(event.kind)) {
    const auto known = ends_.find(rank);
    // A rank's own report tells more than its closed connections, and its first report tells most.
    const bool better = known == ends_.end() || is_reported_by_peer(known->second.event.kind);
    if (better) ends_[rank] = {std::move(event), Clock::now()};
    disturbed_ = true;
  } else {
    late_[rank] = {std::move(event), Clock::now()};
  }
}

pthread_t FaultWatch::coder_of(size_t model) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return models_[model].progress->coder();
}

std::string FaultWatch::stack(pthread_t thread) const {
  return stack_of(thread, options_.stack_signal, options_.stack_file);
}

bool FaultWatch::is_here(int64_t rank) const {
  return members_[static_cast<size_t>(rank)].machine ==
         members_[static_cast<size_t>(rank_)].machine;
}

// -- leaving --

void FaultWatch::leave(Leaving how, const std::string& why) {
  if (process_ != getpid()) return;
  // Unaware: the script does not know of the fault, but its communicators are aborted.
  const bool unaware = failed_ && !delivered_;
  if (how == Leaving::kRaises && unaware) how = Leaving::kGivesUp;
  FaultEvent event{FaultEvent::Kind::kEnded, rank_, 0, 0, progress(), why};
  if (how == Leaving::kRaises) event.kind = FaultEvent::Kind::kRaised;
  if (how == Leaving::kGivesUp) {
    event.kind = FaultEvent::Kind::kGaveUp;
    if (failed_) event.causes = first_fault().ranks;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(left_, true)) return;
  }
  if (how == Leaving::kEnds && unaware) end_process();  // the run has not succeeded
  tell(event);
}

void FaultWatch::wait_for_peer_exit(milliseconds backoff) const {
  if (process_ != getpid()) return;
  std::vector<Report> causes;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [rank, report] : ends_) {
      const FaultEvent::Kind kind = report.event.kind;
      const bool ends = kind != FaultEvent::Kind::kGaveUp && kind != FaultEvent::Kind::kLost;
      if (ends && is_here(rank)) causes.push_back(report);
    }
  }
  if (causes.empty()) return;
  const auto limit = Clock::now() + backoff;
  auto seen = Clock::time_point::min();
  for (const Report& cause : causes) {
    seen = std::max(seen, cause.came);
    const int64_t process = members_[static_cast<size_t>(cause.event.about)].process;
    while (end_of_process(process).lives && Clock::now() < limit) {
      std::this_thread::sleep_for(kPause);
      seen = Clock::now();
    }
  }
  std::this_thread::sleep_until(std::min(limit, seen + kLauncherLooks));
}

void FaultWatch::close() {
  monitor_.close();
  peers_.close();
}

// -- waiting: which faults a rank looks for, which ranks it blames, and what it reports --

namespace {

constexpr milliseconds kSlice{50};         // between two looks at the others
constexpr milliseconds kAnswers{300};      // for the answers to a question
constexpr milliseconds kLastAnswers{900};  // likewise, if none has come
// A collective may still arrive after the end of a rank that had sent all of its part.
constexpr milliseconds kDeathGrace{100};
constexpr milliseconds kIssuedGrace{5000};  // it had issued the collective before it left
// If only the connections between watches are lost, collectives may still arrive.
constexpr milliseconds kLostGrace{5000};
constexpr milliseconds kUnheard{500};     // likewise, if the system can tell more
constexpr milliseconds kWordsLeave{100};  // at most, until a rank's message is sent
constexpr milliseconds kShared{1000};     // so long, at most, answers to one rank serve the others
constexpr int kDistance = 3;              // each warning comes so many times later
constexpr size_t kMostNamed = 8;

double seconds_of(FaultWatch::Clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

// Seconds by which a rank asks later than rank 0, so that most hear a question before they ask.
double delay_of(int64_t rank) { return 0.05 * std::log2(1.0 + static_cast<double>(rank)); }

std::string rounded(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", seconds);
  return text;
}

// An ended rank may not have sent the data of collectives that it had issued.
ExpectedCollective anything_of(ExpectedCollective expected) {
  expected.issued = kUncounted;
  return expected;
}

std::string join(const std::vector<std::string>& parts, const char* between) {
  std::string result;
  for (const std::string& part : parts) result += (result.empty() ? "" : between) + part;
  return result;
}

// Reading, from the text of a backend's error or of one of shared memory, what happened to other
// ranks.
bool holds_any(const std::string& text, std::initializer_list<const char*> words) {
  return std::any_of(words.begin(), words.end(),
                     [&](const char* word) { return text.find(word) != std::string::npos; });
}

bool tells_of_time(const std::string& error) {
  return holds_any(error, {"imed out", "imeout", "did not come"});
}

// A rank that shares memory with another one sees when that one ends. The neighbours of the ended
// rank learn of it, too.
bool tells_of_death(const std::string& error) { return holds_any(error, {" ended while"}); }

// Whether another rank may be the cause: an error of this rank alone contains none of these words.
bool is_networks(const std::string& error) {
  return tells_of_time(error) || tells_of_death(error) ||
         holds_any(error, {"onnect", "peer", "roken pipe", "socket", "NCCL"});
}

}  // namespace

// Returns the ended ranks that count as faults by now.
std::vector<FaultWatch::Report> FaultWatch::ended(const ExpectedCollective& expected,
                                                  Clock::duration grace, bool with_lost) const {
  std::vector<Report> first;
  std::vector<Report> secondary;
  if (!disturbed_) return first;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [rank, report] : ends_) {
    const auto since = Clock::now() - report.came;
    const bool missing = lacks(report.event, expected);
    if (report.event.kind == FaultEvent::Kind::kGaveUp) {
      const bool parted = report.event.issued == kUncounted;
      if ((missing || parted) && since >= 2 * grace) secondary.push_back(report);
    } else if (is_reported_by_peer(report.event.kind)) {
      const bool counts = with_lost || report.event.kind != FaultEvent::Kind::kLost;
      if (since >= grace && counts) first.push_back(report);
    } else if (missing || since >= kIssuedGrace) {
      first.push_back(report);
    }
  }
  return first.empty() ? secondary : first;
}

// Returns the late ranks to blame. A waiting rank is blamed only if no other rank is late: it is
// late because of another one. A rank that has given up counts as ended, not as late: it has said
// which ranks it waited for. If all ranks have issued the collective, the cause is a rank whose
// codec runs for long, or a rank that lacks a later collective of this rank: collectives of several
// buckets take turns.
std::vector<FaultWatch::Report> FaultWatch::late(const ExpectedCollective& expected) const {
  std::vector<Report> causes;
  std::vector<Report> coding;
  std::vector<Report> waiting;
  std::vector<Report> behind;
  const std::lock_guard<std::mutex> lock(mutex_);
  const ExpectedCollective newest = newest_of(expected);
  for (const auto& [rank, report] : late_) {
    const auto end = ends_.find(rank);
    const bool gave_up = end != ends_.end() && end->second.event.kind == FaultEvent::Kind::kGaveUp;
    if (!expects(expected, rank) || gave_up) continue;
    const bool waits_too = waits(report.event, expected);
    if (report.event.kind == FaultEvent::Kind::kSilent) {
      causes.push_back(report);
    } else if (is_counted(expected) && codes_long(report.event, expected)) {
      coding.push_back(report);
    } else if (is_counted(expected) && lacks(report.event, expected)) {
      (waits_too ? waiting : causes).push_back(report);
    } else if (is_counted(expected) && lacks(report.event, newest) && !waits_too) {
      behind.push_back(report);
    }
  }
  for (auto* const some : {&causes, &coding, &waiting}) {
    if (!some->empty()) return *some;
  }
  return behind;
}

// Under `mutex_`. Returns `expected` extended to all collectives that this rank has issued.
ExpectedCollective FaultWatch::newest_of(ExpectedCollective expected) const {
  if (is_counted(expected) && expected.model < models_.size()) {
    const int64_t issued = models_[expected.model].progress->now().issued;
    expected.issued = std::max(expected.issued, issued);
  }
  return expected;
}

// All ranks hear questions and answers, so one that has heard a question does not ask it again: of
// 10,000 ranks that wait for one, a few ask.
void FaultWatch::ask(const ExpectedCollective& expected, milliseconds fresh) {
  FaultEvent question{
      FaultEvent::Kind::kAsked, rank_, static_cast<int64_t>(expected.model), 0, {}, ""};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    question.issued = newest_of(expected).issued;
    const bool is_known = question.model == question_.event.model &&
                          question.issued <= question_.event.issued &&
                          Clock::now() - question_.came < fresh;
    if (is_known) return;
    late_.clear();
    question_ = {question, Clock::now()};
    ++questions_;
  }
  tell(question);
  answer(question);
}

int64_t FaultWatch::questions() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return questions_;
}

void FaultWatch::hear_question(const FaultEvent& question) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto now = Clock::now();
    for (auto report = late_.begin(); report != late_.end();) {
      report = now - report->second.came < kShared ? std::next(report) : late_.erase(report);
    }
    question_ = {question, now};
    ++questions_;
  }
  answer(question);
}

void FaultWatch::wait(const ExpectedCollective& expected,
                      const std::function<bool(milliseconds)>& arrives) {
  const auto start = Clock::now();
  Backoff backoff = new_backoff();
  while (!arrives(kSlice)) {
    try {
      interpreter_.check_signals();
    } catch (...) {
      interrupted_ = true;
      throw;
    }
    look(expected, seconds_of(Clock::now() - start), backoff);
  }
}

// Looks for neighbours that have ended. A rank that ends before it is connected has no connection
// that closes, so silent neighbours are checked, too, after `unheard`. Returns whether another end
// is to be expected: a connection has closed, and its process still lives.
bool FaultWatch::find_ended(Clock::duration unheard) {
  std::vector<int64_t> doubtful;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [rank, neighbour] : neighbours_) {
      const bool silent = Clock::now() - neighbour.heard >= unheard;
      if ((neighbour.closed || silent) && is_here(rank)) doubtful.push_back(rank);
    }
  }
  for (const int64_t rank : doubtful) find_end(rank, /*lost=*/false);
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(doubtful.begin(), doubtful.end(), [&](int64_t rank) {
    return neighbours_[rank].closed && ends_.count(rank) == 0;
  });
}

void FaultWatch::look(const ExpectedCollective& expected, double waited, Backoff& backoff) {
  const auto fault = find_fault(expected, expected, waited, backoff);
  if (fault) raise(*fault);
}

std::optional<Fault> FaultWatch::find_fault(const ExpectedCollective& expected,
                                            const ExpectedCollective& newest, double waited,
                                            Backoff& backoff) {
  find_ended(kUnheard);
  const bool long_ago = waited >= seconds_of(kLostGrace);
  const std::vector<Report> gone = ended(newest, kDeathGrace, long_ago);
  if (!gone.empty()) return fault_of(gone, expected, waited, "");
  if (auto parted = find_mismatch(expected, waited, expected.in_order)) return parted;
  const double turn = backoff.next + delay_of(rank_);
  if (waited >= turn && !backoff.asked) {
    const milliseconds half{std::llround(5e2 * backoff.next)};
    ask(expected, std::min(kShared, half));
    backoff.asked = true;
  } else if (backoff.asked && waited >= turn + seconds_of(kAnswers)) {
    if (auto lone = find_lone_gather(expected, waited)) return lone;
    const bool at_last = waited >= turn + seconds_of(kLastAnswers);
    if (at_last && late(expected).empty()) {
      if (auto parted = find_mismatch(expected, waited, /*any_order=*/true)) return parted;
    }
    if (warn(expected, waited, at_last)) backoff = {backoff.next * kDistance};
  }
  return std::nullopt;
}

namespace {

// Two ranks whose collectives no longer match, so that both would wait forever.
struct Mismatch {
  enum class Of : uint8_t { kEvaluation, kBackward, kOrder };

  Of of = Of::kOrder;
  int64_t more = -1;  // the rank that has run a forward or backward which `fewer` has not
  int64_t fewer = -1;
};

std::optional<Mismatch> mismatch_of(int64_t rank, const Kinds& own, int64_t other,
                                    const Kinds& theirs) {
  const auto evaluations = static_cast<int8_t>(own.evaluations - theirs.evaluations);
  const auto backwards = static_cast<int8_t>(own.backwards - theirs.backwards);
  if (evaluations == 0 && backwards == 0) {
    if (own.digest == theirs.digest) return std::nullopt;
    return Mismatch{Mismatch::Of::kOrder, rank, other};
  }
  const bool is_this = evaluations != 0 ? evaluations > 0 : backwards > 0;
  return Mismatch{evaluations != 0 ? Mismatch::Of::kEvaluation : Mismatch::Of::kBackward,
                  is_this ? rank : other, is_this ? other : rank};
}

std::string description(const Mismatch& found) {
  const std::string more = concat("rank ", found.more);
  const std::string fewer = concat("rank ", found.fewer);
  switch (found.of) {
    case Mismatch::Of::kEvaluation:
      return concat(more, " evaluates while ", fewer, " trains: ", more,
                    " has run a forward without gradients, which gathers parameters from every "
                    "rank, and ",
                    fewer, " has not");
    case Mismatch::Of::kBackward:
      return concat("either ", fewer, " has left out a backward, or ", more,
                    " has made one more: ", more, " is in a backward, and ", fewer, " is in none");
    default:
      return concat(more, " and ", fewer, " run different modules, or in another order");
  }
}

constexpr const char* kWholeCopy =
    "get a whole copy first, on every rank: "
    "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True))";

std::string remedy(const Mismatch& found) {
  switch (found.of) {
    case Mismatch::Of::kEvaluation:
      return concat("Either have every rank evaluate, or ", kWholeCopy,
                    ", and load it into a model that is not wrapped.");
    case Mismatch::Of::kBackward:
      return "Every rank has to make as many backwards that synchronise.";
    default:
      return "Modules whose parameters are sharded apart need every rank: run them on all ranks, "
             "in the same order, or shard those among which a rank chooses as one group, as by "
             "fully_shard([a, b]).";
  }
}

std::string reason(const Mismatch& found) {
  switch (found.of) {
    case Mismatch::Of::kEvaluation:
      return "evaluates alone";
    case Mismatch::Of::kBackward:
      return "has made another number of backwards";
    default:
      return "runs other modules";
  }
}

// Whether a Python stack, innermost call first, is inside of DTensor.full_tensor().
bool gathers_tensor(const std::string& stack) {
  return stack.find(" in full_tensor\n") != std::string::npos;
}

}  // namespace

// Finds a neighbour that has issued other kinds of collectives than this rank; with `any_order`,
// also one that has issued them in another order, though each still has a match.
std::optional<Fault> FaultWatch::find_mismatch(const ExpectedCollective& expected, double waited,
                                               bool any_order) const {
  std::optional<Mismatch> found;
  std::string also;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (expected.model >= models_.size()) return std::nullopt;
    const Model& model = models_[expected.model];
    for (const auto& [rank, neighbour] : neighbours_) {
      if (!expects(expected, rank) || expected.model >= neighbour.progress.size()) continue;
      const ProgressSnapshot& at = neighbour.progress[expected.model];
      const Kinds theirs = Kinds::of(at.kinds);
      if (const auto ours = model.progress->kinds_of(theirs.issued)) {
        found = mismatch_of(rank_, *ours, rank, theirs);
      }
      if (found && found->of == Mismatch::Of::kOrder) {
        if (any_order) {
          also = concat(", and rank ", rank, " is ", activity(at, model.names));
        } else {
          found.reset();
        }
      }
      if (found) break;
    }
  }
  if (!found) return std::nullopt;
  Fault fault;
  fault.ranks = {found->of == Mismatch::Of::kBackward ? found->fewer : found->more};
  fault.reason = reason(*found);
  fault.text = concat("fastsync: ", description(*found), ". Rank ", rank_, " waited ",
                      rounded(waited), " in ", expected.label, also, ". ", remedy(*found));
  fault.seconds = waited;
  fault.parts = true;
  return fault;
}

// Finds a late rank that gathers a whole tensor, for which it needs this rank, which waits.
std::optional<Fault> FaultWatch::find_lone_gather(const ExpectedCollective& expected,
                                                  double waited) const {
  if (!expected.sharded) return std::nullopt;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [rank, report] : late_) {
    const FaultEvent& event = report.event;
    if (!lacks(event, expected) || !gathers_tensor(event.text)) continue;
    Fault fault;
    fault.ranks = {rank};
    fault.reason = "gathers a whole tensor alone";
    fault.text = concat("fastsync: rank ", rank,
                        " gathers a whole tensor (full_tensor(), item() or float()), which "
                        "needs every rank, and rank ",
                        rank_, " is not there: it has waited ", rounded(waited), " in ",
                        expected.label, ". Either have every rank make that call, or ", kWholeCopy,
                        ".\nRank ", rank, ":\n", event.text);
    fault.seconds = waited;
    fault.parts = true;
    return fault;
  }
  return std::nullopt;
}

// Throws once a rank is known to have ended. Waits for a moment, and longer if an end is to be
// expected.
void FaultWatch::await_end(const ExpectedCollective& expected, const std::string& error,
                           double waited) {
  const auto start = Clock::now();
  milliseconds backoff = tells_of_death(error) ? kIssuedGrace : kAnswers;
  for (Clock::duration passed{}; passed < backoff; passed = Clock::now() - start) {
    // A rank's exit reason, if it sent one, arrives before its end is noticed.
    const bool silence_tells = passed >= kDeathGrace;
    if (find_ended(silence_tells ? Clock::duration{} : kUnheard)) backoff = kIssuedGrace;
    std::vector<Report> gone = ended(expected, Clock::duration{});
    if (gone.empty() && silence_tells) gone = ended(anything_of(expected), Clock::duration{});
    const bool known = !gone.empty() && gone.front().event.kind != FaultEvent::Kind::kGaveUp;
    if (known) raise(fault_of(gone, expected, waited, error));
    std::this_thread::sleep_for(milliseconds(10));
  }
}

void FaultWatch::explain(const ExpectedCollective& expected, const std::string& error,
                         double waited) {
  if (!delivered_) check_agreement();  // the error follows from aborted communicators
  if (!is_networks(error)) return;
  ask(expected, kAnswers);
  await_end(expected, error, waited);
  std::vector<Report> found = ended(anything_of(expected), Clock::duration{});
  const bool knows = !found.empty() && found.front().event.kind != FaultEvent::Kind::kGaveUp;
  // A rank whose timeout has passed closes its connections; to ranks whose timeout has not, that
  // looks like a death.
  if (!knows && (tells_of_time(error) || waited >= options_.warn_after)) {
    std::vector<Report> causes = late(expected);
    if (!causes.empty()) found = std::move(causes);
  }
  if (!found.empty()) raise(fault_of(found, expected, waited, error));
}

void FaultWatch::check_agreement() {
  if (!failed_) return;
  Fault fault = first_fault();
  if (delivered_.exchange(true)) {
    fault.text =
        concat("an earlier step has failed, so that the ranks no longer agree: ", fault.text);
  }
  interpreter_.raise(fault);
}

std::vector<std::pair<int64_t, std::string>> FaultWatch::gone() const {
  std::vector<std::pair<int64_t, std::string>> ranks;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [rank, report] : ends_) {
    const bool is_certain =
        !is_reported_by_peer(report.event.kind) || Clock::now() - report.came >= kDeathGrace;
    if (is_certain) ranks.emplace_back(rank, describe(report.event, nullptr, {}, nullptr));
  }
  return ranks;
}

// Returns the first expected rank that waits and is not late itself, in the order of
// `expected.ranks`; this rank if all of them are late.
int64_t FaultWatch::speaker_of(const ExpectedCollective& expected,
                               const std::vector<Report>& late) const {
  std::vector<int64_t> ranks = expected.ranks;
  if (ranks.empty()) {
    ranks.resize(members_.size());
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  for (const int64_t rank : ranks) {
    const bool is_late = std::any_of(late.begin(), late.end(), [rank](const Report& report) {
      return report.event.about == rank;
    });
    if (!is_late) return rank;
  }
  return rank_;
}

// Prints the warning of all waiting ranks, on one of them. Returns whether the time for it has
// come: if no rank is known to be late, not before `at_last`.
bool FaultWatch::warn(const ExpectedCollective& expected, double waited, bool at_last) const {
  std::vector<Report> reports = late(expected);
  if (reports.empty()) reports = ended(expected, Clock::duration{});  // lost ones may have sent
  if (reports.empty() && !at_last) return false;
  if (speaker_of(expected, reports) != rank_) return true;
  std::string text = concat("fastsync: rank ", rank_, " has waited ", rounded(waited));
  text += concat(" in ", expected.label, "\n");
  for (size_t i = 0; i < std::min(reports.size(), kMostNamed); ++i) {
    text += concat("fastsync:   ", words_for(reports[i].event, expected.model), "\n");
    if (reports[i].event.kind == FaultEvent::Kind::kLate) text += reports[i].event.text;
  }
  if (reports.size() > kMostNamed) {
    text += concat("fastsync:   and ", reports.size() - kMostNamed, " more ranks\n");
  }
  if (reports.empty() && is_counted(expected)) {
    text += "fastsync:   no rank says that it is late: the network or the backend is slow\n";
  }
  std::fputs(text.c_str(), stderr);
  return true;
}

Fault FaultWatch::fault_of(const std::vector<Report>& reports, const ExpectedCollective& expected,
                           double waited, const std::string& error) const {
  const FaultEvent& first = reports.front().event;
  Fault fault;
  std::vector<std::string> descriptions;
  std::string stacks;
  std::set<int64_t> ranks;
  for (const Report& report : reports) {
    const std::vector<int64_t> causes = causes_of(report.event, rank_);
    ranks.insert(causes.begin(), causes.end());
    if (descriptions.size() == kMostNamed) continue;
    descriptions.push_back(words_for(report.event, expected.model));
    if (report.event.kind == FaultEvent::Kind::kLate && !report.event.text.empty()) {
      stacks += concat("\nRank ", report.event.about, ":\n", report.event.text);
    }
  }
  fault.ranks.assign(ranks.begin(), ranks.end());
  if (reports.size() > kMostNamed) {
    descriptions.push_back(concat(reports.size() - kMostNamed, " more ranks likewise"));
  }
  fault.text =
      concat("fastsync: ", join(descriptions, "; "), ". Rank ", rank_, " waited ", rounded(waited),
             " in ", expected.label, ". ", remedy_for(first.kind, expected.joins), ".",
             error.empty() ? "" : concat(" (The backend says: ", error, ")"), stacks);
  size_t model = expected.model;
  const ProgressSnapshot* at = progress_of(first, model);
  fault.phase = at == nullptr ? "" : name_of(at->phase);
  fault.bucket = expected.bucket;
  fault.parameters = expected.parameters;
  fault.seconds = waited;
  fault.reason = first.kind == FaultEvent::Kind::kLate ? "is late" : first.text;
  return fault;
}

void FaultWatch::raise(const Fault& fault) {
  give_up(fault);
  delivered_ = true;
  interpreter_.raise(fault);
  throw std::runtime_error(fault.text);
}

Fault FaultWatch::first_fault() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return fault_;
}

// Announces the fault now: a script may catch the error and end normally, and the other ranks would
// then find a rank that ended without a reason.
bool FaultWatch::give_up(const Fault& fault) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failed_) return false;
    fault_ = fault;
    failed_ = true;
  }
  if (survives_) return true;
  tell({FaultEvent::Kind::kGaveUp, rank_, 0, fault.parts ? kUncounted : 0, progress(),
        concat("SyncFault: ", fault.text.substr(0, fault.text.find('\n'))), fault.ranks});
  peers_.flush(kWordsLeave);
  return true;
}

std::string FaultWatch::words_for(const FaultEvent& event, size_t model) const {
  const ProgressSnapshot* at = progress_of(event, model);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (model >= models_.size()) return describe(event, at, {}, nullptr);
  const ProgressSnapshot mine = models_[model].progress->now();
  // A host that does not wait may be in a later step than the ranks that have reported.
  return describe(event, at, models_[model].names, follows_ ? nullptr : &mine);
}

// -- on devices --

DeviceMonitor::Listener FaultWatch::device_listener() {
  DeviceMonitor::Listener listener;
  listener.backoff = [this] { return new_backoff(); };
  listener.is_troubled = [this] { return is_troubled(); };
  listener.find = [this](const DeviceMonitor::Pending& pending) { return find_on_device(pending); };
  listener.is_known_to_script = [this] { return is_known_to_script(); };
  listener.end_process = [this] { end_process(); };
  return listener;
}

void FaultWatch::follow(DeviceMonitor::Ended ended, DeviceMonitor::What what) {
  if (survives_ || process_ != getpid()) return;
  follows_ = true;
  monitor_.follow(std::move(ended), std::move(what));
}

void FaultWatch::add_communicator(comm::Communicator communicator) {
  if (communicator.abort) monitor_.add(std::move(communicator));
}

bool FaultWatch::is_troubled() {
  find_ended(kUnheard);
  return disturbed_ || failed_;
}

bool FaultWatch::find_on_device(const DeviceMonitor::Pending& pending) {
  if (failed_) return true;
  const auto& [oldest, newest, seconds, overdue, backoff] = pending;
  auto fault = find_fault(oldest, newest, seconds, backoff);
  if (!fault && overdue) fault = find_overdue(oldest, seconds, backoff);
  if (!fault) return false;
  if (give_up(*fault)) std::fputs((fault->text + "\n").c_str(), stderr);
  return true;
}

// Blames the late ranks just before the timeout of a backend, which would end this process and
// report less.
std::optional<Fault> FaultWatch::find_overdue(const ExpectedCollective& expected, double waited,
                                              Backoff& backoff) {
  if (backoff.last_asked == 0) {
    ask(expected, kAnswers);
    backoff.last_asked = waited;
  }
  if (waited < backoff.last_asked + seconds_of(kAnswers)) return std::nullopt;
  const std::vector<Report> reports = late(expected);
  if (reports.empty()) return std::nullopt;
  return fault_of(reports, expected, waited, "");
}

// A script that is leaving counts, too: it comes back by itself.
bool FaultWatch::is_known_to_script() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return delivered_ || left_;
}

void FaultWatch::end_process() const {
  const std::string stuck = stack(main_thread_);
  const std::string text =
      concat("fastsync: rank ", rank_, " ends: its script has not come back from where it waits, ",
             "or computes, since this was found: ", first_fault().text, "\n", stuck);
  std::fputs(text.c_str(), stderr);
  std::fflush(stderr);
  _exit(1);
}

// -- scopes of Python --

WaitScope::WaitScope(std::shared_ptr<FaultWatch> watch, Kind kind, const std::string& label,
                     std::vector<int64_t> ranks)
    : watch_(std::move(watch)),
      kind_(kind),
      backoff_(watch_->new_backoff()),
      before_(static_cast<Phase>(watch_->wait_scopes().now().phase)),
      since_(FaultWatch::Clock::now()) {
  Progress& wait_scopes = watch_->wait_scopes();
  if (kind_ == Kind::kTogether) {
    wait_scopes.issue();
    wait_scopes.reach(Phase::kTogether);
  } else if (kind_ == Kind::kWrapping) {
    wait_scopes.reach(Phase::kWrapping);
  }
  expected_.model = kWaitScopes;
  expected_.issued = kind_ == Kind::kTogether ? wait_scopes.issued() : kUncounted;
  expected_.label = label;
  expected_.ranks = std::move(ranks);
}

double WaitScope::waited() const {
  return std::chrono::duration<double>(FaultWatch::Clock::now() - since_).count();
}

void WaitScope::look() { watch_->look(expected_, waited(), backoff_); }

void WaitScope::explain(const std::string& error) { watch_->explain(expected_, error, waited()); }

void WaitScope::end(bool came) {
  if (kind_ == Kind::kTogether && !came) watch_->wait_scopes().take_back();
  watch_->wait_scopes().reach(before_);
}

}  // namespace fastsync::engine
