// A stretch of Python that all ranks enter together: a collective, a rendezvous, the creation of a
// process group.
//
// All ranks of a group reach the same wait scopes in the same order, so a rank that has reached
// fewer of them is late.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fault/fault_watch.h"

namespace fastsync::engine {

class WaitScope {
 public:
  enum class Kind : int64_t {
    kTogether,  // this rank waits for the others, each of which comes here, too
    kWrapping,  // this rank wraps a model, and waits now and then
    kApart,     // this rank may wait; others need not come here as often
  };

  // Enters the scope that errors call `label`. `ranks`: the expected ones; empty: all.
  WaitScope(std::shared_ptr<FaultWatch> watch, Kind kind, const std::string& label,
            std::vector<int64_t> ranks);

  // Checks the other ranks, called from time to time: throws if one has ended, warns of late ones.
  void look();
  // Throws if it is known which rank caused `error`, with which the backend has failed.
  void explain(const std::string& error);
  // Leaves the scope. `came`: this rank's entry counts. It does not if the scope has failed for a
  // reason of its own, which is the same on all ranks.
  void end(bool came);

 private:
  double waited() const;

  std::shared_ptr<FaultWatch> watch_;
  Kind kind_;
  ExpectedCollective expected_;
  Backoff backoff_;
  Phase before_;
  FaultWatch::Clock::time_point since_;
};

}  // namespace fastsync::engine
