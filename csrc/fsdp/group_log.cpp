#include "fsdp/group_log.h"

#include <utility>

#include "check.h"
#include "ops/device.h"

namespace fastsync::engine {

void UnitLog::begin_forward(bool counts, bool evaluates) {
  counts_ = counts;
  evaluates_ = evaluates;
  in_backward_ = false;
  log_.pause(!counts);
  if (counts) log_.begin_forward();
}

void UnitLog::end_forward() {
  if (counts_) log_.end_forward();
  counts_ = true;
  evaluates_ = false;
  log_.pause(false);
}

void UnitLog::begin_backward() {
  in_backward_ = true;
  log_.begin_backward();
}

void UnitLog::end_backward() { log_.end_backward(); }

void UnitLog::end_work() {
  in_backward_ = false;
  if (!std::exchange(reduced_, false)) {
    progress()->reach(Phase::kBetweenSteps);
    return;
  }
  log_.end_step({});
  log_.count_steps(++steps_);
}

int64_t UnitLog::issue(Direction direction, int64_t unit) {
  reduced_ = reduced_ || direction == Direction::kReduce;
  progress()->issue_of_kind(evaluates_, in_backward_, 3 * unit + static_cast<int64_t>(direction));
  return progress()->issued();
}

void UnitPeers::join(std::shared_ptr<UnitLog> log, std::shared_ptr<FaultWatch> faults, Names names,
                     at::Device device) {
  log_ = std::move(log);
  faults_ = std::move(faults);
  device_ = device;
  if (faults_) watched_as_ = faults_->add(log_->progress(), std::move(names));
}

Transfer::Transfer(std::shared_ptr<UnitPeers> peers, std::shared_ptr<const UnitName> unit,
                   Direction direction, int64_t bytes)
    : peers_(std::move(peers)),
      what_{std::move(unit), direction, peers_->watched_as(), !peers_->device().is_cpu()} {
  if (peers_->faults() != nullptr) peers_->faults()->check_agreement();
  what_.issued = peers_->log().issue(direction, what_.unit->number);
  UnitStats& stats = peers_->stats;
  switch (direction) {
    case Direction::kGather:
      ++stats.gathers;
      stats.gathered_bytes += bytes;
      break;
    case Direction::kReduce:
      ++stats.reductions;
      stats.reduced_bytes += bytes;
      break;
    case Direction::kSum:
      stats.summed_bytes += bytes;
      break;
  }
  mark(kStarted, bytes);
}

Mark Transfer::mark_of(Event event) const {
  const auto first = static_cast<uint8_t>(Mark::kGatherStarted);
  return static_cast<Mark>(first + 4 * static_cast<uint8_t>(what_.direction) + event);
}

void Transfer::mark(Event event, int64_t bytes) const {
  peers_->log().marks().mark(mark_of(event), what_.unit->number, bytes);
}

std::function<void()> Transfer::on_done() const {
  return peers_->log().marks().on_done(what_.unit->number, mark_of(kDone));
}

void Transfer::await(const Arrives& arrives, const std::function<void()>& wait) {
  begin_wait();
  const auto explained = [this](const auto& waits) {
    try {
      return waits();
    } catch (const std::exception& error) {
      fail(error.what());
    }
  };
  const auto asked = [&](std::chrono::milliseconds time) {
    return explained([&] { return arrives(time); });
  };
  FaultWatch* const faults = peers_->faults();
  if (faults != nullptr && arrives && !asked({})) faults->wait(expected(), asked);
  explained(wait);
  end_wait();
}

void Transfer::begin_wait() {
  Progress& progress = *peers_->log().progress();
  what_.before = progress.now();
  since_ = FaultWatch::Clock::now();
  if (peers_->faults() != nullptr) backoff_ = peers_->faults()->new_backoff();
  const bool gathers = what_.direction == Direction::kGather;
  progress.await(what_.unit->number, gathers ? Phase::kGatheringUnit : Phase::kReducingUnit);
  mark(kWanted);
}

void Transfer::end_wait() {
  peers_->stats.waited_seconds += waited();
  peers_->log().progress()->reach(static_cast<Phase>(what_.before.phase));
  FaultWatch* const faults = peers_->faults();
  const at::Device device = peers_->device();
  if (faults == nullptr || device.is_cpu()) return;
  faults->follow(ops::mark_stream(device), [what = what_] { return what.expected(); });
}

void Transfer::look() {
  if (peers_->faults() != nullptr) peers_->faults()->look(expected(), waited(), backoff_);
}

void Transfer::arrived() const { mark(kArrived); }

double Transfer::waited() const {
  return std::chrono::duration<double>(FaultWatch::Clock::now() - since_).count();
}

std::string Transfer::What::label() const {
  const char* what = direction == Direction::kGather   ? "the gather of "
                     : direction == Direction::kReduce ? "the reduction of "
                                                       : "the sum over replicas of ";
  return concat(what, unit->words, " ", activity(before, {}));
}

ExpectedCollective Transfer::What::expected() const {
  ExpectedCollective result;
  result.model = model;
  result.issued = issued;
  result.label = label();
  result.parameters = unit->parameters;
  result.joins = false;
  result.sharded = direction != Direction::kSum;
  result.in_order = in_order;
  return result;
}

void Transfer::fail(const std::string& error) const {
  if (peers_->faults() != nullptr) peers_->faults()->explain(expected(), error, waited());
  throw std::runtime_error(
      concat("fastsync: rank ", peers_->rank(), ", ", what_.label(), ": ", error));
}

}  // namespace fastsync::engine
