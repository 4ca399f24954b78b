// Blame: of the late ranks not one that waits itself, and the ranks that a rank names when it gives
// up.
#include <pthread.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "fault/fault_events.h"
#include "harness.h"

namespace fastsync::engine {
namespace {

// The event of a rank that is in `place` in the wait scopes of Python, and in `step` of its only
// model.
FaultEvent in(Phase place, Phase step) {
  FaultEvent event;
  for (const Phase phase : {place, step}) {
    ProgressSnapshot at;
    at.phase = static_cast<int64_t>(phase);
    event.progress.push_back(at);
  }
  return event;
}

ExpectedCollective in_model(size_t model) {
  ExpectedCollective expected;
  expected.model = model;
  expected.issued = 1;
  return expected;
}

// Others wait in a vote, which is a place of Python's, for a rank that still waits for a bucket.
void who_waits_in_a_step_waits_for_those_in_a_place() {
  FS_CHECK(waits(in(Phase::kBetweenSteps, Phase::kWaiting), in_model(kWaitScopes)), "for a bucket");
  FS_CHECK(waits(in(Phase::kBetweenSteps, Phase::kReducingUnit), in_model(kWaitScopes)),
           "for a unit");
  FS_CHECK(!waits(in(Phase::kBetweenSteps, Phase::kBackward), in_model(kWaitScopes)),
           "it computes");
  FS_CHECK(!waits(in(Phase::kWrapping, Phase::kWaiting), in_model(kWaitScopes)),
           "it wraps another");
}

void who_waits_in_a_place_waits_for_those_in_a_step() {
  FS_CHECK(waits(in(Phase::kTogether, Phase::kForward), in_model(1)), "for others in Python");
  FS_CHECK(waits(in(Phase::kBetweenSteps, Phase::kWaiting), in_model(1)), "for a bucket");
  FS_CHECK(!waits(in(Phase::kBetweenSteps, Phase::kForward), in_model(1)), "it computes");
  FS_CHECK(!waits(in(Phase::kBetweenSteps, Phase::kWaiting), in_model(2)), "it lacks the model");
  FS_CHECK(!waits(FaultEvent{}, in_model(kWaitScopes)), "nobody knows");
}

void who_gave_up_passes_on_whom_it_blames() {
  FaultEvent event = in(Phase::kBetweenSteps, Phase::kWaiting);
  event.kind = FaultEvent::Kind::kGaveUp;
  event.about = 3;
  event.text = "SyncFault";
  event.causes = {1, 2};
  const FaultEvent heard = decode_event(encode(event));
  FS_CHECK(heard.text == event.text && heard.about == 3 && heard.progress.size() == 2, "whole");
  FS_CHECK(causes_of(heard, 0) == event.causes, "both");
  FS_CHECK(causes_of(heard, 2) == std::vector<int64_t>{1}, "the other one");
  event.causes = {2};
  FS_CHECK(causes_of(decode_event(encode(event)), 2) == std::vector<int64_t>{3}, "who gave up");
  event.text = "";
  const std::string bytes = encode(event);
  for (size_t size = 0; size < bytes.size(); ++size) decode_event(bytes.substr(0, size));
}

// The time that a codec has been at work travels with where its rank stands.
void who_codes_for_long_is_told_apart() {
  Progress progress;
  progress.reach(Phase::kWaiting);
  FS_CHECK(progress.now().coding == 0, "nothing is coded");
  FaultEvent event = in(Phase::kBetweenSteps, Phase::kWaiting);
  {
    const Progress::Coding at_work(progress);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    FS_CHECK(!codes_long(event, in_model(1)), "another rank");
    event.progress[1] = progress.now();
    FS_CHECK(event.progress[1].coding >= 20, "milliseconds");
    FS_CHECK(!codes_long(event, in_model(1)), "as any codec may");
    FS_CHECK(pthread_equal(progress.coder(), pthread_self()) != 0, "this thread");
  }
  FS_CHECK(progress.now().coding == 0, "it is over");
  event.progress[1].coding = 12345;
  const FaultEvent heard = decode_event(encode(event));
  FS_CHECK(codes_long(heard, in_model(1)), "for long");
  FS_CHECK(!codes_long(heard, in_model(kWaitScopes)) && !codes_long(heard, in_model(2)),
           "elsewhere");
  const std::string text = activity(heard.progress[1], {});
  FS_CHECK(text.find("; its codec has been at work for 12.3 s") != std::string::npos, text.c_str());
}

// A rank that others speak for cannot be in an earlier step than the one that has all averages of
// that step.
void an_old_report_does_not_place_a_rank_in_an_earlier_step() {
  FaultEvent event = in(Phase::kBetweenSteps, Phase::kBetweenSteps);
  event.kind = FaultEvent::Kind::kDied;
  event.about = 2;
  event.text = "was killed by SIGKILL";
  event.age = 85;
  event = decode_event(encode(event));
  ProgressSnapshot at;
  at.step = 1;
  ProgressSnapshot mine;
  mine.step = 5;
  mine.phase = static_cast<int64_t>(Phase::kWaiting);
  const auto says = [&](const std::string& place) {
    const std::string text = describe(event, &at, {}, &mine);
    FS_CHECK(text == concat("rank 2 was killed by SIGKILL ", place), text);
  };
  says("in step 6 (0.0 s earlier it was after step 1)");
  mine.phase = static_cast<int64_t>(Phase::kGathering);
  says("after step 5 (0.0 s earlier it was after step 1)");
  at.step = 5;
  says("after step 5");
  event.kind = FaultEvent::Kind::kLost;
  event.age = 30100;
  says("after step 5, as it said 30.1 s earlier");
  event.kind = FaultEvent::Kind::kRaised;  // which a rank says of itself
  at.step = 4;
  FS_CHECK(describe(event, &at, {}, &mine) == "rank 2 raised was killed by SIGKILL after step 4",
           "");
}

}  // namespace
}  // namespace fastsync::engine

int main(int argc, char** argv) {
  using namespace fastsync::engine;
  return fastsync::testing::run_cases(
      {
          {"step", who_waits_in_a_step_waits_for_those_in_a_place},
          {"place", who_waits_in_a_place_waits_for_those_in_a_step},
          {"report", an_old_report_does_not_place_a_rank_in_an_earlier_step},
          {"blame", who_gave_up_passes_on_whom_it_blames},
          {"codec", who_codes_for_long_is_told_apart},
      },
      argc, argv);
}
