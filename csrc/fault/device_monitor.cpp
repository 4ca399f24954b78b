#include "fault/device_monitor.h"

#include <algorithm>
#include <utility>

#include "comm/thread_name.h"

namespace fastsync::engine {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kSlice{50};     // between two looks
constexpr milliseconds kSettles{500};  // until other ranks know of the fault, too
constexpr milliseconds kLongest{5000};
// A share of the backend's timeout: its own watchdog reports less, and is to come after this one.
constexpr double kOfTimeout = 0.9;
constexpr milliseconds kAborts{1000};  // at most, for aborts under way when the process ends

double seconds_since(DeviceMonitor::Clock::time_point then) {
  return std::chrono::duration<double>(DeviceMonitor::Clock::now() - then).count();
}

}  // namespace

void DeviceMonitor::add(comm::Communicator communicator) {
  const std::lock_guard<std::mutex> lock(mutex_);
  communicators_.push_back(std::move(communicator));
}

void DeviceMonitor::follow(Ended ended, What what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return;
  drop_ended();
  marks_.push_back(std::make_shared<Mark>(
      Mark{std::move(ended), std::move(what), Clock::now(), listener_.backoff()}));
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
}

void DeviceMonitor::close() {
  if (process_ != getpid()) {
    if (thread_.joinable()) thread_.detach();
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  marks_.clear();
  const auto limit = Clock::now() + kAborts;
  for (const std::future<void>& abort : aborts_) abort.wait_until(limit);
  aborts_.clear();
}

// Stops at the first mark that the device has not passed: later ones may lie on other streams, and
// are queried in their turn.
void DeviceMonitor::drop_ended() {
  while (!marks_.empty() && marks_.front()->ended()) marks_.pop_front();
}

void DeviceMonitor::run() {
  comm::name_this_thread("fastsync-device");
  std::unique_lock<std::mutex> lock(mutex_);
  while (!changed_.wait_for(lock, kSlice, [this] { return closed_; })) {
    if (!is_suspicious(lock)) continue;
    drop_ended();
    if (marks_.empty()) continue;
    const std::shared_ptr<Mark> oldest = marks_.front();
    const std::shared_ptr<Mark> newest = marks_.back();
    const bool overdue = is_overdue(*oldest);
    lock.unlock();
    const Pending pending{oldest->what(), newest->what(), seconds_since(oldest->since), overdue,
                          oldest->backoff};
    const bool found = listener_.find(pending);
    lock.lock();
    if (found) return end(lock);
  }
}

// Whether there is a reason to query the device.
bool DeviceMonitor::is_suspicious(std::unique_lock<std::mutex>& lock) {
  if (marks_.empty()) return false;
  const Mark& oldest = *marks_.front();
  const bool is_late = seconds_since(oldest.since) >= oldest.backoff.next;
  if (is_late || is_overdue(oldest)) return true;
  lock.unlock();
  const bool troubled = listener_.is_troubled();
  lock.lock();
  return troubled;
}

bool DeviceMonitor::is_overdue(const Mark& mark) const {
  const double seconds = seconds_since(mark.since);
  return std::any_of(communicators_.begin(), communicators_.end(),
                     [&](const comm::Communicator& each) {
                       const double timeout = each.timeout();
                       return timeout > 0 && seconds >= kOfTimeout * timeout;
                     });
}

void DeviceMonitor::end(std::unique_lock<std::mutex>& lock) {
  const bool early = comes_back(lock, kSettles);
  abort();
  if (early || comes_back(lock, kLongest)) return;
  lock.unlock();
  listener_.end_process();
  lock.lock();
}

bool DeviceMonitor::comes_back(std::unique_lock<std::mutex>& lock, milliseconds within) {
  const auto limit = Clock::now() + within;
  while (Clock::now() < limit) {
    if (changed_.wait_for(lock, kSlice, [this] { return closed_; })) return true;
    lock.unlock();
    const bool knows = listener_.is_known_to_script();
    lock.lock();
    if (knows) return true;
  }
  return false;
}

// Each abort has a thread of its own, because it may block. A blocked one holds up no other.
void DeviceMonitor::abort() {
  for (const comm::Communicator& each : communicators_) {
    std::packaged_task<void()> task(each.abort);
    aborts_.push_back(task.get_future());
    std::thread(std::move(task)).detach();
  }
}

}  // namespace fastsync::engine
