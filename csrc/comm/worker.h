// A thread that takes pipelines of collectives from one to the next, so that no caller has to wait
// between them.
//
// [Note: order on every rank]
// Ranks must start the collectives of one process group in the same order, but their pipelines
// advance at different speeds. Each stage of a pipeline therefore has a process group of its own,
// and pipelines keep the order in which they were submitted at every stage: a younger pipeline
// never overtakes an older one.
//
// [Note: the end of a process]
// A pipeline that hangs, for instance on a rank that has died, keeps its thread beyond main(). The
// other ranks end too, which closes their connections and wakes the thread, when torch's static
// objects may be gone already. So a process leaves its pipelines before it ends: what they wait for
// is aborted while everything is there, and their threads do nothing from then on.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace fastsync::comm {

// The end of a pipeline, to wait for.
class Ticket {
 public:
  // Throws the error that broke the pipeline, or one before it.
  void wait();
  // Calls `fn` once when the pipeline has ended: on the worker's thread, or at once where it has
  // already.
  void on_done(std::function<void()> fn);
  // Waits so long at most.
  bool is_done_within(std::chrono::milliseconds time);

 private:
  friend class Worker;
  void finish(std::exception_ptr error);

  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
  std::function<void()> on_done_;
};

class Worker {
 public:
  // Blocks until the pipeline's current collective is done, then starts the next one; false: there
  // is none.
  using Step = std::function<bool()>;

  Worker();
  // Waits for running pipelines. A pipeline that hangs keeps its thread, which then ends by itself.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  std::shared_ptr<Ticket> submit(Step step);

  // See [Note: the end of a process]. Of all workers: pipelines that run take no further step.
  // `wake` ends what they wait for; they have so long to come back from there. What is submitted
  // later runs as ever.
  static void leave_all(std::chrono::milliseconds timeout, const std::function<void()>& wake);

 private:
  class Busy;

  struct Pipeline {
    Step step;
    std::shared_ptr<Ticket> ticket;
  };

  // Lives on with the worker's thread where that runs longer than the Worker.
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Pipeline> waiting;
    bool stop = false;
    bool idle = true;
    std::exception_ptr broken;
  };

  static void run(const std::shared_ptr<State>& state);
  static void advance(State& state, std::deque<Pipeline>& active, Busy& busy);

  std::shared_ptr<State> state_;
  std::thread thread_;
};

}  // namespace fastsync::comm
