// A place where Python brings all ranks together: a collective, a meeting, the making of a process
// group.
//
// All ranks of a group come to the same places in the same order, so a rank that has come to fewer
// of them is late.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fault_watch.h"

namespace fastsync::engine {

class Visit {
 public:
  enum class Kind : int64_t {
    kTogether,  // this rank waits for the others, each of which comes here
    kWrapping,  // it wraps a model, and waits now and then
    kApart,     // it may wait, and others need not come here as often
  };

  // Comes to `place`, as errors call it. `ranks`: that are waited for; empty: all.
  Visit(std::shared_ptr<FaultWatch> watch, Kind kind, const std::string& place,
        std::vector<int64_t> ranks);

  // Looks out for the others, from time to time: throws where one has ended, warns of those that
  // are late.
  void look();
  // The backend has failed with `error`: throws where it is known who is to blame.
  void explain(const std::string& error);
  // Goes on. `came`: this counts as a visit. It does not where the place has failed for a reason of
  // its own, which is the same on all ranks.
  void end(bool came);

 private:
  double waited() const;

  std::shared_ptr<FaultWatch> watch_;
  Kind kind_;
  Wanted wanted_;
  Patience patience_;
  Phase before_;
  FaultWatch::Clock::time_point since_;
};

}  // namespace fastsync::engine
