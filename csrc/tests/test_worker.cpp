// Pipelines on the worker thread: order at every stage, errors, and leaving early. Meant for
// ThreadSanitizer too.
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../comm/worker.h"
#include "harness.h"

namespace fastsync::comm {
namespace {

using std::chrono::microseconds;

// Pipelines that each stage has started, in order: a pipeline appends its number when it comes to
// the stage.
struct Stages {
  explicit Stages(size_t count) : started(count) {}
  std::mutex mutex;
  std::vector<std::vector<int>> started;

  void start(size_t stage, int pipeline) {
    const std::lock_guard<std::mutex> lock(mutex);
    started.at(stage).push_back(pipeline);
  }
};

// A pipeline whose first stage the submitter starts; each step waits a little and starts the next
// stage.
Worker::Step chain_of(const std::shared_ptr<Stages>& stages, int number, size_t length,
                      int wait_us) {
  stages->start(0, number);
  return [=, stage = size_t{0}]() mutable {
    std::this_thread::sleep_for(microseconds(wait_us));
    if (++stage == length) return false;
    stages->start(stage, number);
    return true;
  };
}

void keeps_order_at_every_link() {
  std::mt19937 random(1);
  for (int round = 0; round < 20; ++round) {
    constexpr int kPipelines = 40;
    constexpr size_t kLinks = 4;
    const auto stages = std::make_shared<Stages>(kLinks);
    Worker worker;
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (int i = 0; i < kPipelines; ++i) {
      const size_t length = 1 + random() % kLinks;
      tickets.push_back(
          worker.submit(chain_of(stages, i, length, static_cast<int>(random() % 50))));
      std::this_thread::sleep_for(microseconds(random() % 100));
    }
    for (const auto& ticket : tickets) ticket->wait();
    for (const auto& started : stages->started) {
      for (size_t i = 1; i < started.size(); ++i) {
        EXPECT(started[i - 1] < started[i], "pipeline ", started[i], " was overtaken by ",
               started[i - 1]);
      }
    }
  }
}

void tells_of_the_end_once() {
  for (int round = 0; round < 200; ++round) {
    Worker worker;
    std::atomic<int> told{0};
    const auto ticket = worker.submit([] { return false; });
    if (round % 2 == 0) ticket->wait();
    ticket->on_done([&] { ++told; });
    ticket->wait();
    while (told == 0) std::this_thread::yield();
    EXPECT(told == 1, "told ", told.load(), " times");
  }
}

void an_error_breaks_what_comes_after_it() {
  Worker worker;
  const auto good = worker.submit([] { return false; });
  good->wait();
  const auto bad = worker.submit([]() -> bool { throw std::runtime_error("cable cut"); });
  const auto late = worker.submit([] { return false; });
  for (const auto& ticket : {bad, late}) {
    const std::string text = testing::message_of<std::runtime_error>([&ticket] { ticket->wait(); });
    EXPECT(text == "cable cut", text);
  }
}

void a_step_is_freed_before_its_end_is_told() {
  Worker worker;
  const auto held = std::make_shared<int>(0);
  const auto ticket = worker.submit([copy = held] { return copy == nullptr; });
  ticket->wait();
  EXPECT(held.use_count() == 1, held.use_count(), " owners");
}

void leaves_a_hanging_chain_behind() {
  const auto release = std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<Ticket> ticket;
  {
    Worker worker;
    ticket = worker.submit([release] {
      while (!*release) std::this_thread::sleep_for(microseconds(100));
      return false;
    });
    std::this_thread::sleep_for(microseconds(1000));
  }
  *release = true;
  ticket->wait();
}

// A pipeline that was left never goes on, though it is woken; later pipelines do.
void a_chain_that_is_left_takes_no_further_step() {
  const auto woken = std::make_shared<std::atomic<bool>>(false);
  const auto steps = std::make_shared<std::atomic<int>>(0);
  std::shared_ptr<Ticket> ticket;
  {
    Worker worker;
    ticket = worker.submit([woken, steps] {
      ++*steps;
      while (!*woken) std::this_thread::sleep_for(microseconds(100));
      return true;
    });
    while (*steps == 0) std::this_thread::yield();
    Worker::leave_all(std::chrono::seconds(20), [&] { *woken = true; });
    EXPECT(!ticket->is_done_within(std::chrono::milliseconds(20)), "it has ended");
    Worker::leave_all(std::chrono::milliseconds(0), [] { EXPECT(false, "somebody is busy"); });
  }
  EXPECT(*steps == 1, steps->load(), " steps");
  Worker other;
  other.submit([] { return false; })->wait();
}

}  // namespace
}  // namespace fastsync::comm

int main(int argc, char** argv) {
  using namespace fastsync::comm;  // NOLINT: cases only
  return fastsync::testing::run_cases({{"order", keeps_order_at_every_link},
                                       {"told once", tells_of_the_end_once},
                                       {"error", an_error_breaks_what_comes_after_it},
                                       {"freed", a_step_is_freed_before_its_end_is_told},
                                       {"hanging", leaves_a_hanging_chain_behind},
                                       {"left", a_chain_that_is_left_takes_no_further_step}},
                                      argc, argv);
}
