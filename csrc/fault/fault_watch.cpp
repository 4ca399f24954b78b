#include "fault/fault_watch.h"

#include <algorithm>
#include <cmath>
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

}  // namespace fastsync::engine
