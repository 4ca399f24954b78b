#include "worker.h"

#include <utility>

#include "thread_name.h"

namespace fastsync::comm {

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
  }
  if (fn) fn();
  const std::lock_guard<std::mutex> lock(mutex_);
  done_ = true;
  changed_.notify_all();
}

Worker::Worker() : state_(std::make_shared<State>()), thread_([state = state_] { run(state); }) {}

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
    state_->waiting.push_back(Chain{std::move(step), ticket});
  }
  state_->changed.notify_all();
  return ticket;
}

// At most one new chain joins between two rounds, so that no two chains are ever at the same link.
void Worker::run(const std::shared_ptr<State>& state) {
  name_this_thread("fastsync-comm");
  std::deque<Chain> active;
  while (true) {
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
    }
    advance(*state, active);
  }
}

// Youngest first: its current collective was started before the older chains' latest ones.
void Worker::advance(State& state, std::deque<Chain>& active) {
  for (auto chain = active.rbegin(); chain != active.rend(); ++chain) {
    if (!chain->ticket) continue;  // ended before an older, longer one
    try {
      if (state.broken) std::rethrow_exception(state.broken);
      if (chain->step()) continue;
    } catch (...) {
      state.broken = std::current_exception();
    }
    chain->step = nullptr;  // frees what it held before anyone learns of the end
    std::exchange(chain->ticket, nullptr)->finish(state.broken);
  }
  while (!active.empty() && !active.front().ticket) active.pop_front();
}

}  // namespace fastsync::comm
