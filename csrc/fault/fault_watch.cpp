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
  models_.push_back({places_, {}, nullptr});
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
  listener.beat = [this] { return beat(); };
  listener.on_beat = [this](int64_t other, const std::string& beat) { on_beat(other, beat); };
  listener.on_news = [this](const std::string& news) { on_news(news); };
  listener.on_closed = [this](int64_t other, bool lost) { on_closed(other, lost); };
  announce_termination(concat("fastsync: rank ", rank, " ends: SIGTERM\n"));
  return peers_.connect(addresses, rank, std::move(listener));
}

size_t FaultWatch::add(std::shared_ptr<const Progress> progress, Names names,
                       std::shared_ptr<PaceBoard> board) {
  const std::lock_guard<std::mutex> lock(mutex_);
  models_.push_back({std::move(progress), std::move(names), std::move(board)});
  return models_.size() - 1;
}

std::vector<Standing> FaultWatch::standings() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Standing> all;
  for (const Model& model : models_) all.push_back(model.progress->now());
  return all;
}

std::string FaultWatch::beat() const {
  Beat beat{standings(), {}};
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Model& model : models_) {
    beat.paces.push_back(model.board ? model.board->encode() : "");
  }
  return encode(beat);
}

void FaultWatch::on_beat(int64_t rank, const std::string& bytes) {
  Beat beat = decode_beat(bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < std::min(models_.size(), beat.paces.size()); ++i) {
    if (models_[i].board) models_[i].board->merge(beat.paces[i]);
  }
  neighbours_[rank] = {std::move(beat.standings), Clock::now()};
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
  News news{News::Kind::kDied, rank, 0, 0, {}, "ended without a word"};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (left_ || ends_.count(rank) != 0) return;
    news.standings = neighbours_[rank].standings;
    news.age = age_of(neighbours_[rank]);
  }
  if (is_here(rank)) {
    const ProcessEnd end = end_of_process(members_[static_cast<size_t>(rank)].process);
    if (end.lives) return;
    if (!end.how.empty()) news.text = end.how;
  } else if (lost) {
    news.kind = News::Kind::kLost;
    news.text = "was lost with its machine, or with the network to it,";
  }
  note(news);
  tell(news);
}

void FaultWatch::on_news(const std::string& bytes) {
  News news = decode_news(bytes);
  if (news.kind == News::Kind::kAsked) {
    answer(news);
  } else if (is_hearsay(news.kind) && news.about == rank_) {
    tell({News::Kind::kAlive, rank_, 0, 0, {}, ""});
  } else {
    note(std::move(news));
  }
}

// Reports this rank if it is behind or delayed by its codec. Reports silent neighbours, too,
// whatever they have issued: a stopped rank may not have sent its data.
void FaultWatch::answer(const News& question) {
  const Wanted wanted{static_cast<size_t>(question.model), question.issued, -1, "", {}};
  News mine{News::Kind::kLate, rank_, question.model, question.issued, standings(), ""};
  const bool codes = codes_long(mine, wanted);
  if (is_counted(wanted) && (codes || lacks(mine, wanted)) && question.about != rank_) {
    mine.text = stack(codes ? coder_of(wanted.model) : main_thread_);
    tell(mine);
  }
  std::vector<News> silent;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [rank, neighbour] : neighbours_) {
      if (Clock::now() - neighbour.heard < kSilence || ends_.count(rank) != 0) continue;
      silent.push_back({News::Kind::kSilent, rank, 0, 0, neighbour.standings, ""});
      silent.back().age = age_of(neighbour);
    }
  }
  for (News& news : silent) {
    const int64_t process = members_[static_cast<size_t>(news.about)].process;
    if (is_here(news.about) && is_stopped(process)) news.text = "is stopped (SIGSTOP, SIGTSTP)";
    note(news);
    tell(std::move(news));
  }
}

void FaultWatch::tell(News news) { peers_.flood(encode(news)); }

void FaultWatch::note(News news) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t rank = news.about;
  if (news.kind == News::Kind::kAlive) {
    ends_.erase(rank);
  } else if (is_end(news.kind)) {
    const auto known = ends_.find(rank);
    // A rank's own report tells more than its closed connections, and its first report tells most.
    const bool better = known == ends_.end() || is_hearsay(known->second.news.kind);
    if (better) ends_[rank] = {std::move(news), Clock::now()};
    disturbed_ = true;
  } else {
    late_[rank] = {std::move(news), Clock::now()};
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
  News news{News::Kind::kEnded, rank_, 0, 0, standings(), why};
  if (how == Leaving::kRaises) news.kind = News::Kind::kRaised;
  if (how == Leaving::kGivesUp) {
    news.kind = News::Kind::kGaveUp;
    if (failed_) news.blames = first_fault().ranks;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(left_, true)) return;
  }
  if (how == Leaving::kEnds && unaware) end_process();  // the run has not succeeded
  tell(news);
}

void FaultWatch::outlast(milliseconds patience) const {
  if (process_ != getpid()) return;
  std::vector<Report> causes;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [rank, report] : ends_) {
      const News::Kind kind = report.news.kind;
      const bool ends = kind != News::Kind::kGaveUp && kind != News::Kind::kLost;
      if (ends && is_here(rank)) causes.push_back(report);
    }
  }
  if (causes.empty()) return;
  const auto limit = Clock::now() + patience;
  auto seen = Clock::time_point::min();
  for (const Report& cause : causes) {
    seen = std::max(seen, cause.came);
    const int64_t process = members_[static_cast<size_t>(cause.news.about)].process;
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
