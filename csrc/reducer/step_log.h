// The log of this rank's last synchronised step: its times, its parameters, its error.
//
// Feeds the logging data, the timeline if there is one, and the step timing that other ranks learn.
// A step costs a few readings of the clock and one bit per parameter.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fault/progress.h"
#include "fault/step_timing.h"
#include "reducer/timeline.h"

namespace fastsync::engine {

// When the host reached the milestones of a step, in nanoseconds; 0: it did not.
struct StepTimes {
  int64_t forward_start = 0;
  int64_t forward_end = 0;
  int64_t backward_start = 0;
  int64_t first_send = 0;
  int64_t backward_end = 0;  // of the gradients' computation
  int64_t received = 0;      // all averages have arrived
};

struct StepReport {
  StepTimes times;          // since the epoch
  int64_t buckets = 0;      // sent
  std::vector<bool> used;   // parameters that received a gradient, by index; empty: no step yet
  bool same_so_far = true;  // each step used the same parameters as the one before
  std::string error;        // of the last failed call or backward
};

class StepLog {
 public:
  // Records into `timeline` from now on; nullptr: no longer.
  void set_timeline(std::shared_ptr<Timeline> timeline);
  // Posts this rank's step timing on `board` from now on; null: no longer.
  void use_board(std::shared_ptr<StepTimingBoard> board) { board_ = std::move(board); }
  void plan_installed(int64_t plans) { plans_ = plans; }
  // Sets the number of synchronised backwards.
  void count_steps(int64_t steps);
  void mark(Mark mark, int64_t bucket, int64_t bytes = 0) const {
    if (timeline_ && !paused_) timeline_->record(mark, bucket, bytes);
  }
  // Returns a function to call when the collective of a bucket or unit is done; empty without a
  // timeline.
  std::function<void()> on_done(int64_t index, Mark mark = Mark::kDone) const {
    return timeline_ && !paused_ ? timeline_->on_done(index, mark) : nullptr;
  }
  // Leaves marks out while `paused`.
  void pause(bool paused) { paused_ = paused; }

  void begin_forward();
  void end_forward();
  void begin_backward();
  void sending();
  void sent() { timing_.reach(Activity::kBackward); }
  void end_backward();
  // All buckets have been sent; other wrappers of the backward may wait before this one does.
  void begin_wait() { timing_.reach(Activity::kWaiting); }
  // Counts this rank as waiting while the returned object lives.
  Lap waiting() { return {timing_, Activity::kWaiting}; }
  // The ranks have planned.
  void restart_timing() { timing_.restart(); }
  int64_t busy() const { return timing_.busy(); }
  void end_step(std::vector<bool> used);
  // The trained parameters change: earlier steps cannot be compared with later ones.
  void forget_used() { last_.used.clear(); }
  // A gradient has come, by the parameter's index.
  void arrived(size_t param) { progress_->arrived(param); }
  const std::shared_ptr<Progress>& progress() const { return progress_; }
  void note_error(std::string text) { last_.error = std::move(text); }

  const std::vector<bool>& used() const { return last_.used; }
  StepReport report() const;

 private:
  StepTimes times_;   // of the running step, on the steady clock
  int64_t sent_ = 0;  // buckets of the running step
  StepReport last_;
  int64_t steps_ = 0;
  int64_t plans_ = 0;
  std::shared_ptr<Timeline> timeline_;
  bool paused_ = false;
  StepTiming timing_;
  std::shared_ptr<StepTimingBoard> board_;
  std::shared_ptr<Progress> progress_ = std::make_shared<Progress>();
};

}  // namespace fastsync::engine
