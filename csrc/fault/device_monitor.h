// Watches for faults of other ranks while a device, not the host, waits for them.
//
// [Note: faults on a device]
// With a backend of a device (NCCL and the like) streams wait for averages, so the script goes on
// and no thread notices a fault. The monitor therefore follows marks: events in a stream behind
// such a wait. The script's thread drops the marks that the device has passed whenever it adds one.
// A second thread queries the device only for a reason: a rank has ended, or the oldest mark is
// older than the threshold of warnings. No step waits for that, and no rank sends anything.
//
// Once there is a fault:
//
//   at once         the report is on stderr, the other ranks know, and the script's next call
//                   raises it
//   kSettles later  communicators are aborted: kernels and the host's waits end. An abort lets
//                   kernels run to their end without data, on other ranks too; these should know of
//                   the fault before their scripts go on. If the script already has the error, the
//                   abort comes at once, so that nothing delays the exit.
//   kLongest later  a process whose script has not come back is ended, as the watchdogs of backends
//                   do at their timeouts.
//
// With elastic training the host waits instead (reducer/survival.h). A captured step cannot be
// followed.
#pragma once

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "fault/fault_events.h"

namespace fastsync::engine {

class DeviceMonitor {
 public:
  using Clock = std::chrono::steady_clock;
  // Whether a device has passed a mark.
  using Ended = std::function<bool()>;
  // Describes the expected collective; called only if other ranks may be at fault.
  using What = std::function<ExpectedCollective()>;

  // The marks that the device has not passed.
  struct Pending {
    ExpectedCollective oldest;
    ExpectedCollective newest;
    double seconds = 0;    // since the oldest mark was made
    bool overdue = false;  // the backend is about to give up
    Backoff& backoff;      // for the oldest
  };
  // All but `backoff` are called from the monitor's thread, without its lock.
  struct Listener {
    std::function<Backoff()> backoff;
    std::function<bool()> is_troubled;         // a rank has ended, or may have
    std::function<bool(const Pending&)> find;  // whether there is a fault, which it reports
    std::function<bool()> is_known_to_script;
    std::function<void()> end_process;  // of a script that does not come back
  };

  explicit DeviceMonitor(Listener listener) : listener_(std::move(listener)) {}
  ~DeviceMonitor() { close(); }
  DeviceMonitor(const DeviceMonitor&) = delete;
  DeviceMonitor& operator=(const DeviceMonitor&) = delete;

  void add(comm::Communicator communicator);
  void follow(Ended ended, What what);
  // Stops following marks, and waits a moment for running aborts.
  void close();

 private:
  struct Mark {
    Ended ended;
    What what;
    Clock::time_point since;
    Backoff backoff;
  };

  void run();
  bool is_suspicious(std::unique_lock<std::mutex>& lock);
  void drop_ended();
  bool is_overdue(const Mark& mark) const;
  void end(std::unique_lock<std::mutex>& lock);
  bool comes_back(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds within);
  void abort();

  const Listener listener_;
  const int64_t process_ = getpid();  // to tell a forked one
  std::mutex mutex_;                  // of what follows
  std::condition_variable changed_;
  bool closed_ = false;
  std::deque<std::shared_ptr<Mark>> marks_;  // the oldest first
  std::vector<comm::Communicator> communicators_;
  std::vector<std::future<void>> aborts_;
  std::thread thread_;  // starts with the first mark
};

}  // namespace fastsync::engine
