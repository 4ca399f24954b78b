// Tests of the fault monitor of devices: when it queries the device, and its actions once there is
// a fault. Meant for ThreadSanitizer, too.
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>

#include "fault/device_monitor.h"
#include "harness.h"

namespace fastsync::engine {
namespace {

using std::chrono::milliseconds;

// Answers in place of the ranks' watch.
struct Ranks {
  std::atomic<bool> troubled{false};
  std::atomic<bool> known{false};
  std::atomic<int> searches{0};
  std::atomic<int> aborts{0};
  std::promise<std::string> found;  // wait_scopes of the oldest and the newest mark
  std::promise<void> aborted;
  std::promise<void> ended;

  DeviceMonitor::Listener listener(double warn_after) {
    DeviceMonitor::Listener made;
    made.backoff = [warn_after] { return Backoff{warn_after}; };
    made.is_troubled = [this] { return troubled.load(); };
    made.find = [this](const DeviceMonitor::Pending& pending) {
      if (searches++ == 0) found.set_value(pending.oldest.label + " " + pending.newest.label);
      return true;
    };
    made.is_known_to_script = [this] { return known.load(); };
    made.end_process = [this] { ended.set_value(); };
    return made;
  }
  comm::Communicator communicator() {
    return {[this] {
              if (aborts++ == 0) aborted.set_value();
            },
            [] { return 0.0; }};
  }
};

DeviceMonitor::What named(const std::string& label) {
  return [label] {
    ExpectedCollective expected;
    expected.label = label;
    return expected;
  };
}

constexpr double kNever = 1e9;
constexpr milliseconds kLooks{200};  // several times

void asks_no_device_without_a_reason() {
  Ranks ranks;
  std::atomic<int> asked{0};
  DeviceMonitor monitor(ranks.listener(kNever));
  const auto ended = [&] {
    ++asked;
    return false;
  };
  monitor.follow(ended, named("a"));
  std::this_thread::sleep_for(kLooks);
  EXPECT(asked == 0, asked.load());
  monitor.follow(ended, named("b"));
  std::this_thread::sleep_for(kLooks);
  EXPECT(asked == 1, "the script's thread asks when it comes by: ", asked.load());
  EXPECT(ranks.searches == 0, ranks.searches.load());
}

void looks_for_nobody_once_the_device_has_passed_all_marks() {
  Ranks ranks;
  ranks.troubled = true;
  DeviceMonitor monitor(ranks.listener(0));
  for (int i = 0; i < 10; ++i) monitor.follow([] { return true; }, named("a"));
  std::this_thread::sleep_for(kLooks);
  EXPECT(ranks.searches == 0, ranks.searches.load());
}

void names_what_the_device_has_not_passed() {
  Ranks ranks;
  ranks.known = true;
  DeviceMonitor monitor(ranks.listener(kNever));
  monitor.add(ranks.communicator());
  monitor.follow([] { return true; }, named("a"));
  for (const char* label : {"b", "c", "d"}) monitor.follow([] { return false; }, named(label));
  ranks.troubled = true;
  const std::string found = ranks.found.get_future().get();
  EXPECT(found == "b d", found);
  ranks.aborted.get_future().wait();
}

void searches_when_a_mark_is_old() {
  Ranks ranks;
  ranks.known = true;
  DeviceMonitor monitor(ranks.listener(0.2));
  monitor.follow([] { return false; }, named("a"));
  EXPECT(ranks.found.get_future().get() == "a a", "");
}

void ends_a_script_that_does_not_come_back() {
  Ranks ranks;
  ranks.troubled = true;
  DeviceMonitor monitor(ranks.listener(kNever));
  monitor.add(ranks.communicator());
  monitor.follow([] { return false; }, named("a"));
  ranks.ended.get_future().wait();
  EXPECT(ranks.aborts == 1, "before, its waits are ended: ", ranks.aborts.load());
}

// The thread of the blocked abort lives longer than the monitor.
void waits_for_no_abort_that_blocks() {
  const auto goes_on = std::make_shared<std::promise<void>>();
  const std::shared_future<void> may_go(goes_on->get_future());
  {
    Ranks ranks;
    ranks.troubled = ranks.known = true;
    DeviceMonitor monitor(ranks.listener(kNever));
    monitor.add({[may_go] { may_go.wait(); }, [] { return 0.0; }});
    monitor.add(ranks.communicator());
    monitor.follow([] { return false; }, named("a"));
    ranks.aborted.get_future().wait();
  }
  goes_on->set_value();
}

}  // namespace
}  // namespace fastsync::engine

int main(int argc, char** argv) {
  using namespace fastsync::engine;
  return fastsync::testing::run_cases(
      {
          {"reason", asks_no_device_without_a_reason},
          {"passed", looks_for_nobody_once_the_device_has_passed_all_marks},
          {"names", names_what_the_device_has_not_passed},
          {"old", searches_when_a_mark_is_old},
          {"ends", ends_a_script_that_does_not_come_back},
          {"blocks", waits_for_no_abort_that_blocks},
      },
      argc, argv);
}
