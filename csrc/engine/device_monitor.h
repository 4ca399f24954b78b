// What looks out for other ranks while a device, and not the host, waits for them.
//
// [Note: faults on a device]
// A backend of a device (NCCL and its kin) has streams wait for averages, so the script goes on and
// nobody looks up. What is followed is a mark in a stream behind such a wait. The script's thread
// drops marks that its device has passed when it comes by, and a thread beside it asks the device
// only where there is a reason: a rank has ended, or the oldest mark is older than the threshold of
// warnings. No step waits for that, and no rank sends anything.
//
// Once there is a fault:
//
//   at once         its report is on stderr, the other ranks are told, and the script's next call
//                   raises it
//   kSettles later  communicators are aborted: kernels and the host's waits end. No earlier: an
//                   abort has kernels run to their end without data, on other ranks too, and these
//                   should know of the fault before their script can go on. A script that has been
//                   told gets it at once, so that nothing holds up its end.
//   kLongest later  a script that has not come back is ended, as the watchdogs of backends do at
//                   their timeouts.
//
// Ranks that survive deaths have the host wait instead (reducer_elastic.cpp), and a captured step
// cannot be followed.
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

#include "../comm/communicator.h"
#include "wanted.h"

namespace fastsync::engine {

class DeviceMonitor {
 public:
  using Clock = std::chrono::steady_clock;
  // Whether a device has passed a mark.
  using Ended = std::function<bool()>;
  // What is waited for; asked only where others may be at fault.
  using What = std::function<Wanted()>;

  // What the device has not passed.
  struct Pending {
    Wanted oldest;
    Wanted newest;
    double seconds = 0;    // since it should have begun to wait for the oldest
    bool overdue = false;  // the backend is about to give up
    Patience& patience;    // with the oldest
  };
  // Called from the monitor's thread, without its lock, but the first.
  struct Listener {
    std::function<Patience()> patience;
    std::function<bool()> is_troubled;         // a rank has ended, or may have
    std::function<bool(const Pending&)> find;  // whether there is a fault; says so, and tells ranks
    std::function<bool()> is_known_to_script;
    std::function<void()> end_process;  // of a script that does not come back
  };

  explicit DeviceMonitor(Listener listener) : listener_(std::move(listener)) {}
  ~DeviceMonitor() { close(); }
  DeviceMonitor(const DeviceMonitor&) = delete;
  DeviceMonitor& operator=(const DeviceMonitor&) = delete;

  void add(comm::Communicator communicator);
  void follow(Ended ended, What what);
  // Follows nothing any more, and gives aborts under way a moment.
  void close();

 private:
  struct Mark {
    Ended ended;
    What what;
    Clock::time_point since;
    Patience patience;
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
