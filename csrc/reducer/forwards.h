// Decides which backwards synchronise.
//
// [Note: which backwards synchronise]
// A backward synchronises if it reaches the outputs of a forward outside no_sync() whose step has
// not been made yet. So several forwards may come before their backwards, in any order, and each of
// these averages. A loss may also bypass the outputs, or lie in an object that no search for
// tensors looks into: so the first backward after such a forward synchronises too, unless it
// reaches the outputs of another forward of this wrapper. Every other backward only accumulates: a
// second one through the same graph, one under no_sync(), any work on the bare module, a step of
// another wrapper of the same parameters. Between steps the hooks do nothing.
//
// A script may also announce a backward, as DDP's `reducer.prepare_for_backward()` does. Then the
// next backward synchronises, whichever forward it belongs to, as soon as it reaches outputs or
// accumulates a gradient. The step of a backward that failed has not been made: the next one
// through the same graph makes it. A forward within a backward announces that backward, too: an
// activation checkpoint recomputes it there, and its first run may not have synchronised.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

namespace fastsync::engine {

// A forward of the wrapper, as its outputs' hooks know it.
struct ForwardPass {
  bool syncs = false;  // and its step has not been made yet
  int64_t number = 0;  // of the wrapper's forwards
};

// Backwards are told apart by the numbers that autograd gives them.
class Forwards {
 public:
  // A forward has ended. `watched`: its outputs hold tensors whose backward will be seen.
  void ended(bool syncs, bool watched) {
    ++ended_;
    if (std::exchange(made_step_, false) || !syncs) opaque_ = 0;
    may_bypass_ = syncs && (watched || may_bypass_);
    if (syncs && !watched) ++opaque_;
  }

  // The next backward synchronises.
  void announce() { announced_ = true; }

  // The number of one that is about to end.
  int64_t next() const { return ended_ + 1; }

  // The step of the forwards so far will not be made: their backwards no longer synchronise.
  void skipped() {
    step_begins();
    opaque_ = 0;
    skipped_ = ended_;
  }

  // A backward has reached the outputs of `pass`. Returns whether it synchronises because of that.
  bool reached(ForwardPass& pass, int backward) {
    known_backward_ = backward;
    const bool again = pass.number == failed_;
    const bool due = (std::exchange(pass.syncs, false) || again) && pass.number > skipped_;
    if (!due && !announced_) return false;
    step_begins();
    opaque_ = 0;
    begun_by_ = pass.number;
    return true;
  }

  // A gradient arrives although no output was reached. Returns whether its backward synchronises.
  bool bypassed(int backward) {
    const bool due = (may_bypass_ || opaque_ > 0) && known_backward_ != backward;
    if (!due && !announced_) return false;
    step_begins();
    opaque_ = std::max<int64_t>(0, opaque_ - 1);
    begun_by_ = 0;
    return true;
  }

  // The backward that began the last step failed: its step has not been made.
  void failed() {
    failed_ = begun_by_;
    may_bypass_ = may_bypass_ || begun_by_ == 0;
  }

 private:
  void step_begins() {
    announced_ = false;
    may_bypass_ = false;
    made_step_ = true;
    failed_ = 0;
  }

  int64_t ended_ = 0;
  int64_t skipped_ = 0;
  bool may_bypass_ = false;  // no step has begun since a forward whose outputs are watched
  int64_t opaque_ = 0;       // forwards since then whose outputs cannot be; each has one backward
  bool made_step_ = false;   // since the last forward
  bool announced_ = false;   // the next backward synchronises, whatever it reaches
  int64_t begun_by_ = 0;     // number of the forward whose outputs began the last step; 0: of none
  int64_t failed_ = 0;       // ... if the backward failed that was to make it; else 0
  int known_backward_ = -1;  // the last one that reached outputs of any forward
};

}  // namespace fastsync::engine
