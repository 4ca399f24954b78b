#include "fault_watch.h"

#include <algorithm>
#include <cstdio>
#include <set>
#include <thread>
#include <utility>

#include "../check.h"
#include "backend_error.h"
#include "process.h"

namespace fastsync::engine {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kSlice{50};     // between two looks at the others
constexpr milliseconds kAnswers{300};  // for answers to a question to come
// A collective may still arrive after the end of a rank that had sent all of its part.
constexpr milliseconds kDeathGrace{100};
constexpr milliseconds kIssuedGrace{5000};  // it had issued the collective before it left
constexpr milliseconds kSilence{1500};      // of a neighbour's beats
constexpr milliseconds kUnheard{500};       // likewise, where the system can tell more
constexpr milliseconds kWordsLeave{100};    // at most, until what a rank says is on its way
constexpr int kDistance = 3;                // each warning comes so many times later
constexpr size_t kMostNamed = 8;

double seconds_of(FaultWatch::Clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

std::string rounded(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", seconds);
  return text;
}

// A rank that has ended may not have sent what it had issued.
Wanted anything_of(Wanted wanted) {
  wanted.issued = kUncounted;
  return wanted;
}

std::string join(const std::vector<std::string>& parts, const char* between) {
  std::string result;
  for (const std::string& part : parts) result += (result.empty() ? "" : between) + part;
  return result;
}

}  // namespace

FaultWatch::FaultWatch(const std::string& host, Options options, Interpreter interpreter)
    : options_(options), interpreter_(std::move(interpreter)), peers_(host) {
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
    neighbours_[other].heard = Clock::now();  // one that never speaks is silent from here on
  }
  comm::Peers::Listener listener;
  listener.beat = [this] { return beat(); };
  listener.on_beat = [this](int64_t other, const std::string& beat) { on_beat(other, beat); };
  listener.on_news = [this](const std::string& news) { on_news(news); };
  listener.on_closed = [this](int64_t other) { on_closed(other); };
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

// -- the thread's --

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

void FaultWatch::on_closed(int64_t rank) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    neighbours_[rank].closed = true;
  }
  find_end(rank);
}

// A process of this machine may have lost a connection only, or end a moment after it has closed it.
void FaultWatch::find_end(int64_t rank) {
  News news{News::Kind::kDied, rank, 0, 0, {}, ""};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (left_ || ends_.count(rank) != 0) return;
    news.standings = neighbours_[rank].standings;
  }
  if (is_here(rank)) {
    const ProcessEnd end = end_of_process(members_[static_cast<size_t>(rank)].process);
    if (end.lives) return;
    news.text = end.how.empty() ? "ended without a word" : end.how;
  } else {
    news.text = "ended without a word, or its machine cannot be reached";
  }
  note(news);
  tell(news);
}

void FaultWatch::on_news(const std::string& bytes) {
  News news = decode_news(bytes);
  if (news.kind == News::Kind::kAsked) {
    answer(news);
  } else if (news.kind == News::Kind::kDied && news.about == rank_) {
    tell({News::Kind::kAlive, rank_, 0, 0, {}, ""});
  } else {
    note(std::move(news));
  }
}

// Says so where this rank is behind, and for neighbours that do not speak, whatever they have issued: who has been stopped
// may not have sent it.
void FaultWatch::answer(const News& question) {
  const Wanted wanted{static_cast<size_t>(question.model), question.issued, -1, "", {}};
  News mine{News::Kind::kLate, rank_, question.model, question.issued, standings(), ""};
  if (is_counted(wanted) && lacks(mine, wanted) && question.about != rank_) {
    mine.text = stack();
    tell(mine);
  }
  std::vector<News> silent;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [rank, neighbour] : neighbours_) {
      if (Clock::now() - neighbour.heard < kSilence || ends_.count(rank) != 0) continue;
      silent.push_back({News::Kind::kSilent, rank, 0, 0, neighbour.standings, ""});
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
    // What a rank says of itself tells more than its closed connections, and the first thing it says most.
    const bool better = known == ends_.end() || known->second.news.kind == News::Kind::kDied;
    if (better) ends_[rank] = {std::move(news), Clock::now()};
    disturbed_ = true;
  } else {
    late_[rank] = {std::move(news), Clock::now()};
  }
}

std::string FaultWatch::stack() const {
  return stack_of(main_thread_, options_.stack_signal, options_.stack_file);
}

bool FaultWatch::is_here(int64_t rank) const {
  return members_[static_cast<size_t>(rank)].machine ==
         members_[static_cast<size_t>(rank_)].machine;
}

// -- that of who waits --

// Those for which it is time.
std::vector<FaultWatch::Report> FaultWatch::ended(const Wanted& wanted,
                                                  Clock::duration grace) const {
  std::vector<Report> first;
  std::vector<Report> secondary;
  if (!disturbed_) return first;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [rank, report] : ends_) {
    const auto since = Clock::now() - report.came;
    const bool missing = lacks(report.news, wanted);
    if (report.news.kind == News::Kind::kGaveUp) {
      if (missing && since >= 2 * grace) secondary.push_back(report);
    } else if (report.news.kind == News::Kind::kDied) {
      if (since >= grace) first.push_back(report);
    } else if (missing || since >= kIssuedGrace) {
      first.push_back(report);
    }
  }
  return first.empty() ? secondary : first;
}

// Who waits itself is late because of another; it is named only where there is nobody else.
std::vector<FaultWatch::Report> FaultWatch::late(const Wanted& wanted) const {
  std::vector<Report> causes;
  std::vector<Report> waiting;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [rank, report] : late_) {
    if (!wants(wanted, rank)) continue;
    if (report.news.kind == News::Kind::kSilent) {
      causes.push_back(report);
    } else if (is_counted(wanted) && lacks(report.news, wanted)) {
      (waits(report.news, wanted) ? waiting : causes).push_back(report);
    }
  }
  return causes.empty() ? waiting : causes;
}

void FaultWatch::ask(const Wanted& wanted) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    late_.clear();
  }
  const News question{News::Kind::kAsked, rank_, static_cast<int64_t>(wanted.model),
                      wanted.issued,      {},    ""};
  tell(question);
  answer(question);
}

void FaultWatch::wait(const Wanted& wanted, const std::function<bool(milliseconds)>& arrives) {
  const auto start = Clock::now();
  Patience patience = new_patience();
  while (!arrives(kSlice)) {
    try {
      interpreter_.check_signals();
    } catch (...) {
      interrupted_ = true;
      throw;
    }
    look(wanted, seconds_of(Clock::now() - start), patience);
  }
}

// One that ends before it has been connected has no connection that closes, so neighbours that have not been heard for so long
// are looked for, too. Returns whether the end of one is to be expected: its connection has closed, and its process lives.
bool FaultWatch::find_ended(Clock::duration unheard) {
  std::vector<int64_t> doubtful;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [rank, neighbour] : neighbours_) {
      const bool silent = Clock::now() - neighbour.heard >= unheard;
      if ((neighbour.closed || silent) && is_here(rank)) doubtful.push_back(rank);
    }
  }
  for (const int64_t rank : doubtful) find_end(rank);
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(doubtful.begin(), doubtful.end(), [&](int64_t rank) {
    return neighbours_[rank].closed && ends_.count(rank) == 0;
  });
}

void FaultWatch::look(const Wanted& wanted, double waited, Patience& patience) {
  find_ended(kUnheard);
  const std::vector<Report> gone = ended(wanted, kDeathGrace);
  if (!gone.empty()) raise(gone, wanted, waited, "");
  if (waited >= patience.next && !patience.asked) {
    ask(wanted);
    patience.asked = true;
  } else if (patience.asked && waited >= patience.next + seconds_of(kAnswers)) {
    warn(wanted, waited);
    patience = {patience.next * kDistance, false};
  }
}

// Throws once the end of a rank is known. Waits for a moment, and longer where one is to be expected.
void FaultWatch::await_end(const Wanted& wanted, const std::string& error, double waited) {
  const auto start = Clock::now();
  milliseconds patience = tells_of_death(error) ? kIssuedGrace : kAnswers;
  for (Clock::duration passed{}; passed < patience; passed = Clock::now() - start) {
    // The words of a rank come before its end is seen, if it has left any.
    const bool silence_tells = passed >= kDeathGrace;
    if (find_ended(silence_tells ? Clock::duration{} : kUnheard)) patience = kIssuedGrace;
    std::vector<Report> gone = ended(wanted, Clock::duration{});
    if (gone.empty() && silence_tells) gone = ended(anything_of(wanted), Clock::duration{});
    const bool known = !gone.empty() && gone.front().news.kind != News::Kind::kGaveUp;
    if (known) raise(gone, wanted, waited, error);
    std::this_thread::sleep_for(milliseconds(10));
  }
}

void FaultWatch::explain(const Wanted& wanted, const std::string& error, double waited) {
  if (!is_networks(error)) return;
  ask(wanted);
  await_end(wanted, error, waited);
  std::vector<Report> found = ended(anything_of(wanted), Clock::duration{});
  const bool knows = !found.empty() && found.front().news.kind != News::Kind::kGaveUp;
  // A rank whose time is over closes its connections, which looks like a death to those whose time is not.
  if (!knows && (tells_of_time(error) || waited >= options_.warn_after)) {
    std::vector<Report> causes = late(wanted);
    if (!causes.empty()) found = std::move(causes);
  }
  if (!found.empty()) raise(found, wanted, waited, error);
}

void FaultWatch::check_agreement() const {
  if (!raised_) return;
  Fault fault = fault_;
  fault.text =
      concat("an earlier step has failed, so that the ranks no longer agree: ", fault.text);
  interpreter_.raise(fault);
}

std::vector<std::pair<int64_t, std::string>> FaultWatch::gone() const {
  std::vector<std::pair<int64_t, std::string>> ranks;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [rank, report] : ends_) {
    const bool is_certain =
        report.news.kind != News::Kind::kDied || Clock::now() - report.came >= kDeathGrace;
    if (is_certain) ranks.emplace_back(rank, describe(report.news, nullptr, {}));
  }
  return ranks;
}

// One rank speaks for all that wait: the first that is not late itself.
void FaultWatch::warn(const Wanted& wanted, double waited) const {
  const std::vector<Report> reports = late(wanted);
  int64_t speaker = 0;
  const auto is_late = [&](const Report& report) { return report.news.about == speaker; };
  while (!wants(wanted, speaker) || std::any_of(reports.begin(), reports.end(), is_late)) ++speaker;
  if (speaker != rank_) return;
  std::string text = concat("fastsync: rank ", rank_, " has waited ", rounded(waited));
  text += concat(" in ", wanted.place, "\n");
  for (size_t i = 0; i < std::min(reports.size(), kMostNamed); ++i) {
    text += concat("fastsync:   ", words_for(reports[i].news, wanted.model), "\n");
    if (reports[i].news.kind == News::Kind::kLate) text += reports[i].news.text;
  }
  if (reports.size() > kMostNamed) {
    text += concat("fastsync:   and ", reports.size() - kMostNamed, " more ranks\n");
  }
  if (reports.empty())
    text += "fastsync:   every rank has come: the network or the backend is slow\n";
  std::fputs(text.c_str(), stderr);
}

void FaultWatch::raise(const std::vector<Report>& reports, const Wanted& wanted, double waited,
                       const std::string& error) {
  const News& first = reports.front().news;
  Fault fault;
  std::vector<std::string> descriptions;
  std::string stacks;
  std::set<int64_t> ranks;
  for (const Report& report : reports) {
    const std::vector<int64_t> causes = causes_of(report.news, rank_);
    ranks.insert(causes.begin(), causes.end());
    if (descriptions.size() == kMostNamed) continue;
    descriptions.push_back(words_for(report.news, wanted.model));
    if (report.news.kind == News::Kind::kLate && !report.news.text.empty()) {
      stacks += concat("\nRank ", report.news.about, ":\n", report.news.text);
    }
  }
  fault.ranks.assign(ranks.begin(), ranks.end());
  if (reports.size() > kMostNamed) {
    descriptions.push_back(concat(reports.size() - kMostNamed, " more ranks likewise"));
  }
  fault.text =
      concat("fastsync: ", join(descriptions, "; "), ". Rank ", rank_, " waited ", rounded(waited),
             " in ", wanted.place, ". ", remedy_for(first.kind, wanted.joins), ".",
             error.empty() ? "" : concat(" (The backend says: ", error, ")"), stacks);
  size_t model = wanted.model;
  const Standing* at = standing_of(first, model);
  fault.phase = at == nullptr ? "" : name_of(at->phase);
  fault.bucket = wanted.bucket;
  fault.parameters = wanted.parameters;
  fault.seconds = waited;
  fault.reason = first.kind == News::Kind::kLate ? "is late" : first.text;
  if (!raised_) give_up(fault);
  interpreter_.raise(fault);
  throw std::runtime_error(fault.text);
}

// A script may catch the error and end by itself. Then the others would find one that ended without a word.
void FaultWatch::give_up(const Fault& fault) {
  fault_ = fault;
  raised_ = true;
  if (survives_) return;
  tell({News::Kind::kGaveUp, rank_, 0, 0, standings(),
        concat("SyncFault: ", fault.text.substr(0, fault.text.find('\n'))), fault.ranks});
  peers_.flush(kWordsLeave);
}

std::string FaultWatch::words_for(const News& news, size_t model) const {
  const Standing* at = standing_of(news, model);
  const std::lock_guard<std::mutex> lock(mutex_);
  return describe(news, at, model < models_.size() ? models_[model].names : Names());
}

// -- leaving --

void FaultWatch::leave(Leaving how, const std::string& why) {
  if (process_ != getpid()) return;
  News news{News::Kind::kEnded, rank_, 0, 0, standings(), why};
  if (how == Leaving::kRaises) news.kind = News::Kind::kRaised;
  if (how == Leaving::kGivesUp) {
    news.kind = News::Kind::kGaveUp;
    if (raised_) news.blames = fault_.ranks;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::exchange(left_, true)) return;
  }
  tell(news);
}

void FaultWatch::close() { peers_.close(); }

}  // namespace fastsync::engine
