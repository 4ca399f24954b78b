// The activity of a model's units: counters, marks on a timeline, errors that name a unit.
//
//   UnitLog    of a model: its steps, its timeline, and its progress for other ranks to see
//   UnitPeers  of the ranks of a group: the bytes sent to them, and the watch for their faults
//   Transfer   a collective of a unit: from its start until the computation has its result
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fault/fault_watch.h"
#include "reducer/step_log.h"

namespace fastsync::engine {

// Counters of this rank's collectives and waits since the units were made.
struct UnitStats {
  int64_t gathers = 0;
  int64_t reductions = 0;
  int64_t gathered_bytes = 0;  // sent to gather
  int64_t reduced_bytes = 0;   // sent to reduce
  int64_t summed_bytes = 0;    // sent to replicas
  double waited_seconds = 0;   // by the host
};

// The name of a unit in messages and on pages.
struct UnitName {
  int64_t number = 0;  // among those of the model
  std::string words;   // "unit 'blocks.3' (12 parameters, 'a' to 'b', 1.2 MiB)"
  std::vector<std::string> parameters;
};

enum class Direction : uint8_t {
  kGather,  // parameters
  kReduce,  // gradients
  kSum,     // gradients, over replicas: ranks with the same shares
};

class UnitLog {
 public:
  // Begins the model's outermost forward. One that does not count, as without gradients, belongs to
  // no step. `evaluates`: it computes no gradients of parameters that are trained.
  void begin_forward(bool counts, bool evaluates);
  void end_forward();
  void begin_backward();
  // The gradients are computed; some still travel.
  void end_backward();
  // All gradients are delivered. This ends a step if any were reduced.
  void end_work();
  void set_timeline(std::shared_ptr<Timeline> timeline) { log_.set_timeline(std::move(timeline)); }
  int64_t steps() const { return steps_; }

  // Counts one more collective of all units, in the order that all ranks have in common. Returns
  // their number.
  int64_t issue(Direction direction, int64_t unit);
  const StepLog& marks() const { return log_; }
  const std::shared_ptr<Progress>& progress() const { return log_.progress(); }

 private:
  StepLog log_;
  int64_t steps_ = 0;
  bool counts_ = true;
  bool evaluates_ = false;
  bool in_backward_ = false;
  bool reduced_ = false;  // since the last step
};

class UnitPeers {
 public:
  explicit UnitPeers(int64_t rank) : rank_(rank) {}

  // Joins the units that share these peers to the log and the watch of their model. Must be called
  // in the same order on every rank. `faults`: null without a watch. `names`: of all of the model's
  // units. `device`: of the units.
  void join(std::shared_ptr<UnitLog> log, std::shared_ptr<FaultWatch> faults, Names names,
            at::Device device);

  int64_t rank() const { return rank_; }
  UnitLog& log() const { return *log_; }
  FaultWatch* faults() const { return faults_.get(); }
  size_t watched_as() const { return watched_as_; }
  at::Device device() const { return device_; }

  UnitStats stats;

 private:
  int64_t rank_;
  std::shared_ptr<UnitLog> log_ = std::make_shared<UnitLog>();
  std::shared_ptr<FaultWatch> faults_;
  size_t watched_as_ = 0;
  at::Device device_ = at::kCPU;
};

class Transfer {
 public:
  // Begins the collective: counts it, and marks its start. `bytes`: that leave this rank. Throws if
  // the ranks no longer agree.
  Transfer(std::shared_ptr<UnitPeers> peers, std::shared_ptr<const UnitName> unit,
           Direction direction, int64_t bytes);

  // Returns a function to call when the collective is done, from any thread; empty without a
  // timeline.
  std::function<void()> on_done() const;

  // Whether the result arrives within that time.
  using Arrives = std::function<bool(std::chrono::milliseconds)>;
  // Waits: with `arrives` if that is given, then by `wait`. Throws errors that name the unit, or
  // the rank to blame.
  void await(const Arrives& arrives, const std::function<void()>& wait);
  // The same in three parts, for a caller that waits by itself: begin_wait(), end_wait(), and
  // arrived() once the result can be computed with.
  void begin_wait();
  void end_wait();
  // One check during the wait: throws if a rank has ended that the collective needs, and warns of
  // late ranks when it is time.
  void look();
  void arrived() const;
  // Throws an error for `error`, with which the backend has failed.
  [[noreturn]] void fail(const std::string& error) const;

 private:
  enum Event : uint8_t { kStarted, kDone, kWanted, kArrived };

  Mark mark_of(Event event) const;
  void mark(Event event, int64_t bytes = 0) const;
  ExpectedCollective expected() const { return what_.expected(); }
  double waited() const;

  // Describes the collective, even when it is over for the host and not yet for a device.
  struct What {
    std::shared_ptr<const UnitName> unit;
    Direction direction;
    size_t model;   // as the fault watch numbers them
    bool in_order;  // see ExpectedCollective
    int64_t issued = 0;
    ProgressSnapshot before{};  // the model's progress when the wait began

    // "the gather of unit 'blocks.3' (...) in the forward of step 3"
    std::string label() const;
    ExpectedCollective expected() const;
  };

  std::shared_ptr<UnitPeers> peers_;
  What what_;
  FaultWatch::Clock::time_point since_;
  Backoff backoff_;
};

}  // namespace fastsync::engine
