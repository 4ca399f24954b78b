// The arithmetic of device times, with events whose device is a pair of numbers: how far it has
// come, and when it came to each.
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>

#include "fault/device_clock.h"
#include "harness.h"

namespace fastsync::testing {
namespace {

constexpr double kMs = 1e6;      // nanoseconds
constexpr double kSecond = 1e9;  // nanoseconds
constexpr double kDrift =
    50e-6;  // the device's clock runs fast by that, as much as two quartzes may differ

// An event like CUDA's: knows when its device came to it, by the device's clock, and gives the time
// between two as fp32 milliseconds.
struct Event {
  double reached = 0;  // nanoseconds on the host's clock
  const double* now = nullptr;

  bool query() const { return reached <= *now; }
  double elapsedTime(const Event& later) const {
    return static_cast<double>(static_cast<float>((later.reached - reached) * (1 + kDrift) / kMs));
  }
};

using Origin = engine::Origin<Event>;
using Anchor = Origin::Anchor;

// A training whose steps take 100 ms. Times in nanoseconds, on the host's clock.
struct Training {
  double now = 0;

  Event at(double time) const { return {time, &now}; }
  // The host records it at `time`, and the device comes to it `late` after that.
  Anchor anchor(double time, double late = 0) const {
    return {std::make_shared<Event>(at(time + late)), std::llround(time)};
  }
  double error(const Origin& origin, double time) const {
    const std::optional<int64_t> found = engine::host_time_of(origin, at(time));
    EXPECT(found, "a mark at ", time, " that the device has come to has no time");
    return static_cast<double>(*found) - time;
  }
};

void resolution_does_not_fade() {
  Training training;
  training.now = 1e15;
  for (double start = 0; start < 3600 * kSecond; start += 37.123456789 * kSecond) {
    const Origin origin{training.anchor(start), training.anchor(start - 100 * kMs)};
    for (double after = 0; after < 100 * kMs; after += 0.777 * kMs) {
      const double error = training.error(origin, start + after);
      // The drift over this step and the one before, and what fp32 resolves of them.
      EXPECT(std::fabs(error) < 200 * kMs * kDrift + 20, after, " ns after an origin at ", start,
             " a mark is off by ", error, " ns");
    }
  }
}

void what_has_not_come_has_no_time() {
  Training training;
  training.now = 50 * kMs;
  const Origin origin{training.anchor(10 * kMs), {}};
  EXPECT(engine::host_time_of(origin, training.at(49 * kMs)), "a mark that has come");
  EXPECT(!engine::host_time_of(origin, training.at(51 * kMs)), "a mark that has not come");
  const Origin ahead{training.anchor(60 * kMs), {}};
  EXPECT(!engine::host_time_of(ahead, training.at(49 * kMs)), "an origin that has not come");
  EXPECT(!engine::host_time_of(Origin{}, training.at(49 * kMs)), "no origin");
}

// Work that other code had put on its stream is done first.
void a_late_origin_is_found_out() {
  Training training;
  training.now = 1e12;
  const double start = 7 * kSecond;
  const Origin late{training.anchor(start, 30 * kMs), training.anchor(start - 100 * kMs)};
  const double error = training.error(late, start + 40 * kMs);
  EXPECT(std::fabs(error) < 140 * kMs * kDrift + 20, "off by ", error, " ns");
  // The one before it was later still: nothing is known, and nothing gets worse.
  const Origin both{training.anchor(start, 3 * kMs), training.anchor(start - 100 * kMs, 50 * kMs)};
  EXPECT(std::fabs(training.error(both, start + 40 * kMs) + 3 * kMs) < 1e4, "worse than alone");
}

// Two origins far apart, as around an evaluation, say nothing of each other.
void distant_origins_do_not_add_their_drift() {
  Training training;
  training.now = 1e15;
  const double start = 1000 * kSecond;
  const Origin origin{training.anchor(start), training.anchor(0)};
  const double error = training.error(origin, start + 10 * kMs);
  EXPECT(std::fabs(error) < 10 * kMs * kDrift + 20, "off by ", error, " ns");
}

}  // namespace
}  // namespace fastsync::testing

int main(int argc, char** argv) {
  using namespace fastsync::testing;
  const std::vector<Case> cases = {
      {"resolution_does_not_fade", resolution_does_not_fade},
      {"what_has_not_come_has_no_time", what_has_not_come_has_no_time},
      {"a_late_origin_is_found_out", a_late_origin_is_found_out},
      {"distant_origins_do_not_add_their_drift", distant_origins_do_not_add_their_drift},
  };
  return run_cases(cases, argc, argv);
}
