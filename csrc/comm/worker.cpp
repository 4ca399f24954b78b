#include "worker.h"

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <utility>

#include "thread_name.h"

namespace fastsync::comm {
namespace {

// Counts of all workers of this process. Forked children have no such threads, whatever the numbers
// say there.
struct Threads {
  std::atomic<int> busy{0};
  std::atomic<uint64_t> left{0};  // how often they were left
  std::atomic<pid_t> process{0};

  static Threads& of_process() {
    static Threads threads;
    return threads;
  }
};

}  // namespace

// A thread that has pipelines, until it has none or its process leaves it.
class Worker::Busy {
 public:
  Busy() : left_(Threads::of_process().left) {}

  void begin() {
    if (std::exchange(busy_, true)) return;
    Threads& all = Threads::of_process();
    ++all.busy;
    left_ = all.left;
  }
  void end() {
    if (std::exchange(busy_, false)) --Threads::of_process().busy;
  }
  // Does not return where the process has left this thread: destroying what a pipeline holds would
  // use torch, too.
  void go_on() {
    if (left_ == Threads::of_process().left) return;
    end();
    while (true) pause();
  }

 private:
  bool busy_ = false;
  uint64_t left_;
};

void Worker::leave_all(std::chrono::milliseconds timeout, const std::function<void()>& wake) {
  Threads& all = Threads::of_process();
  if (all.process != getpid()) return;
  ++all.left;
  if (all.busy == 0) return;
  wake();
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (all.busy != 0 && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Ticket::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
  if (error_) std::rethrow_exception(error_);
}

bool Ticket::is_done_within(std::chrono::milliseconds time) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, time, [this] { return done_; });
}

void Ticket::on_done(std::function<void()> fn) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!done_) {
      on_done_ = std::move(fn);
      return;
    }
  }
  fn();
}

void Ticket::finish(std::exception_ptr error) {
  std::function<void()> fn;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    error_ = std::move(error);
    fn = std::exchange(on_done_, nullptr);
    done_ = !fn;
  }
  if (fn) fn();
  const std::lock_guard<std::mutex> lock(mutex_);
  done_ = true;
  changed_.notify_all();
}

Worker::Worker() : state_(std::make_shared<State>()) {
  Threads::of_process().process = getpid();
  thread_ = std::thread([state = state_] { run(state); });
}

Worker::~Worker() {
  bool idle = false;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stop = true;
    idle = state_->idle && state_->waiting.empty();
  }
  state_->changed.notify_all();
  if (idle) {
    thread_.join();
  } else {
    thread_.detach();
  }
}

std::shared_ptr<Ticket> Worker::submit(Step step) {
  auto ticket = std::make_shared<Ticket>();
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->waiting.push_back(Pipeline{std::move(step), ticket});
  }
  state_->changed.notify_all();
  return ticket;
}

// At most one new pipeline joins between two rounds, so that no two pipelines are ever at the same
// stage.
void Worker::run(const std::shared_ptr<State>& state) {
  name_this_thread("fastsync-comm");
  std::deque<Pipeline> active;
  Busy busy;
  while (true) {
    if (active.empty()) busy.end();
    {
      std::unique_lock<std::mutex> lock(state->mutex);
      state->idle = active.empty();
      if (active.empty()) {
        state->changed.wait(lock, [&] { return state->stop || !state->waiting.empty(); });
      }
      if (!state->waiting.empty()) {
        active.push_back(std::move(state->waiting.front()));
        state->waiting.pop_front();
      }
      if (active.empty()) return;
      state->idle = false;
      busy.begin();
    }
    advance(*state, active, busy);
  }
}

// Youngest first: its current collective was started before the older pipelines' latest ones.
void Worker::advance(State& state, std::deque<Pipeline>& active, Busy& busy) {
  for (auto pipeline = active.rbegin(); pipeline != active.rend(); ++pipeline) {
    if (!pipeline->ticket) continue;  // ended before an older, longer one
    bool more = false;
    try {
      if (state.broken) std::rethrow_exception(state.broken);
      more = pipeline->step();
    } catch (...) {
      state.broken = std::current_exception();
    }
    busy.go_on();
    if (more) continue;
    pipeline->step = nullptr;  // frees what it held before anyone learns of the end
    std::exchange(pipeline->ticket, nullptr)->finish(state.broken);
  }
  while (!active.empty() && !active.front().ticket) active.pop_front();
}

}  // namespace fastsync::comm
