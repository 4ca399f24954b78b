#include "reducer/step_log.h"

#include <chrono>

namespace fastsync::engine {
namespace {

template <typename Clock>
int64_t now_on() {
  const auto now = Clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

int64_t now() { return now_on<std::chrono::steady_clock>(); }

}  // namespace

void StepLog::set_timeline(std::shared_ptr<Timeline> timeline) {
  timeline_ = std::move(timeline);
  if (timeline_) timeline_->begin_step(steps_);
}

void StepLog::count_steps(int64_t steps) {
  steps_ = steps;
  progress_->count_steps(steps);
  progress_->reach(Phase::kBetweenSteps);
  if (timeline_) timeline_->begin_step(steps);
}

void StepLog::begin_forward() {
  times_ = StepTimes{};
  times_.forward_start = now();
  mark(Mark::kForwardStart, plans_);
  progress_->reach(Phase::kForward);
  timing_.reach(Activity::kForward);
}

void StepLog::end_forward() {
  times_.forward_end = now();
  mark(Mark::kForwardEnd, plans_);
  progress_->reach(Phase::kAfterForward);
}

void StepLog::begin_backward() {
  times_.backward_start = now();
  mark(Mark::kBackwardStart, plans_);
  progress_->begin_backward();
  timing_.reach(Activity::kBackward);
  times_.first_send = 0;
  sent_ = 0;
}

void StepLog::sending() {
  if (sent_++ == 0) times_.first_send = now();
  progress_->sent(sent_);
  timing_.reach(Activity::kPacking);
}

void StepLog::end_backward() {
  times_.backward_end = now();
  mark(Mark::kBackwardEnd, plans_);
}

void StepLog::end_step(std::vector<bool> used) {
  times_.received = now();
  mark(Mark::kStepEnd, plans_);
  last_.times = times_;
  last_.buckets = sent_;
  if (!last_.used.empty() && used != last_.used) last_.same_so_far = false;
  last_.used = std::move(used);
  const std::optional<Times> means = timing_.end_step(steps_ + 1);
  if (means && board_) board_->post(steps_ + 1, *means);
}

// Milestones are taken on the steady clock and shown on the wall clock.
StepReport StepLog::report() const {
  StepReport report = last_;
  const int64_t offset = now_on<std::chrono::system_clock>() - now();
  StepTimes& times = report.times;
  for (int64_t* time : {&times.forward_start, &times.forward_end, &times.backward_start,
                        &times.first_send, &times.backward_end, &times.received}) {
    if (*time != 0) *time += offset;
  }
  return report;
}

}  // namespace fastsync::engine
