// A rank's knowledge of the others while it waits for them: which have ended and why, which are
// late and where they are.
//
// One per process group. The models of the group report their progress to it (progress.h),
// connections between the ranks carry that and fault events (comm/peers.h), and a rank that waits
// for a bucket checks in between:
//
//   ended   A rank's connections close, or it says why it leaves. Ranks that wait for a collective
//           that it has not issued get the error at once; ranks that no longer need it go on.
//   late    A rank that has waited for long asks. A rank that is behind answers with its position
//           and its Python stack, which a signal handler writes without the GIL. If it cannot
//           answer, its neighbours do.
//
// If the host does not wait, a thread beside the script asks instead: [Note: faults on a device] in
// device_monitor.h.
//
// Python makes the error; nothing here depends on its type.
#pragma once

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/peers.h"
#include "fault/device_monitor.h"
#include "fault/fault_events.h"
#include "fault/step_timing.h"

namespace fastsync::engine {

// The contents of an error; see fastsync.SyncFault.
struct Fault {
  std::string text;
  std::vector<int64_t> ranks;
  std::string phase;
  int64_t bucket = -1;
  std::vector<std::string> parameters;
  double seconds = 0;
  std::string reason;
  bool parts = false;  // the ranks' collectives do not match, however many each has issued
};

// A rank, as the others see it.
struct Member {
  comm::PeerAddress address;
  int64_t process = 0;
  std::string machine;  // equal on ranks that share process numbers
};

// How a rank leaves.
enum class Leaving : int64_t {
  kEnds,     // its script has reached its end
  kRaises,   // by an exception of its own
  kGivesUp,  // by an error that others have caused
};

class FaultWatch {
 public:
  using Clock = std::chrono::steady_clock;

  struct Options {
    double warn_after = 10;  // seconds of waiting
    double lost_after = 30;  // seconds in which another machine may acknowledge nothing
    // A handler of `stack_signal` writes the Python stack of its thread to this file.
    int stack_file = -1;
    int stack_signal = 0;
  };
  struct Interpreter {
    std::function<void(const Fault&)> raise;  // throws
    std::function<void()> check_signals;      // throws if a signal handler raises
  };

  FaultWatch(const std::string& host, Options options, Interpreter interpreter);
  ~FaultWatch();
  FaultWatch(const FaultWatch&) = delete;
  FaultWatch& operator=(const FaultWatch&) = delete;

  const comm::PeerAddress& address() const { return peers_.address(); }
  // Connects to all ranks of the group. Returns the ranks that could not be reached. Must be called
  // on the thread whose stack reports are to show.
  std::vector<int64_t> connect(std::vector<Member> members, int64_t rank);
  // Progress through the wait scopes of Python: model `kWaitScopes`.
  Progress& wait_scopes() { return *wait_scopes_; }
  // Adds a model of the group, in the same order on every rank. Returns its number. `board`:
  // collects which ranks the others wait for; null: not collected.
  size_t add(std::shared_ptr<const Progress> progress, Names names,
             std::shared_ptr<StepTimingBoard> board = nullptr);

  // Returns once `arrives`, which waits at most for the time that it is given, returns true. Throws
  // the interpreter's exception if an expected rank has ended or a signal has come. Warns of late
  // ranks.
  void wait(const ExpectedCollective& expected,
            const std::function<bool(std::chrono::milliseconds)>& arrives);
  // One check, for callers with a wait loop of their own: throws if an expected rank has ended, and
  // warns when it is time. `waited`: seconds.
  void look(const ExpectedCollective& expected, double waited, Backoff& backoff);
  Backoff new_backoff() const { return {options_.warn_after}; }
  // Throws if it is known which rank caused `error`, with which a backend has failed. `waited`:
  // seconds.
  void explain(const ExpectedCollective& expected, const std::string& error, double waited);
  // From now on ranks may go on after an error of this watch. A rank that cannot tells the others
  // itself that it gives up.
  void survive() { survives_ = true; }
  // Throws if a fault has been found before, by this thread or another: the ranks no longer agree.
  void check_agreement();

  // Watches the other ranks while a device waits for the collective that `what` describes, and the
  // host does not. `ended` says whether the device has passed it. Both may be called from any
  // thread.
  void follow(DeviceMonitor::Ended ended, DeviceMonitor::What what);
  // Adds a communicator, which a fault aborts.
  void add_communicator(comm::Communicator communicator);

  // Returns the ranks that have ended, and how, in words. An end of a moment ago may be missing.
  std::vector<std::pair<int64_t, std::string>> gone() const;
  // Returns how many times ranks have asked which are late, as far as this one has heard.
  int64_t questions() const;
  // Whether a signal has ended a wait.
  bool is_interrupted() const { return interrupted_; }

  // Tells the others that this rank leaves, once; `why`: in words.
  void leave(Leaving how, const std::string& why);
  // Delays this rank's exit after an error that other, ending ranks have caused: returns once those
  // of this machine have ended and their launcher has had time to see that they ended first; after
  // `timeout` at the latest.
  void wait_for_peer_exit(std::chrono::milliseconds timeout) const;
  // Closes the connections.
  void close();
  // Lets go of the connections, in a forked process.
  void abandon() { peers_.abandon(); }

 private:
  struct Report {
    FaultEvent event;
    Clock::time_point came;
  };
  struct Neighbour {
    std::vector<ProgressSnapshot> progress;
    Clock::time_point heard;
    bool closed = false;  // its connection
  };
  struct Model {
    std::shared_ptr<const Progress> progress;
    Names names;
    std::shared_ptr<StepTimingBoard> board;
  };

  std::vector<ProgressSnapshot> progress() const;
  std::string heartbeat() const;
  void on_heartbeat(int64_t rank, const std::string& bytes);
  void on_closed(int64_t rank, bool lost);
  void on_event(const std::string& bytes);
  void hear_question(const FaultEvent& question);
  void answer(const FaultEvent& question);
  void tell(FaultEvent event);
  void note(FaultEvent event);
  pthread_t coder_of(size_t model) const;
  std::string stack(pthread_t thread) const;
  bool is_here(int64_t rank) const;
  static int64_t age_of(const Neighbour& neighbour);
  void find_end(int64_t rank, bool lost);
  bool find_ended(Clock::duration unheard);
  void await_end(const ExpectedCollective& expected, const std::string& error, double waited);
  // Asks all ranks which are late, unless one has asked since `fresh` ago.
  void ask(const ExpectedCollective& expected, std::chrono::milliseconds fresh);
  // Returns the fault of another rank that makes further waiting useless, if there is one. Warns of
  // late ranks when it is time. `newest`: the last collective that cannot end without the other
  // ranks.
  std::optional<Fault> find_fault(const ExpectedCollective& expected,
                                  const ExpectedCollective& newest, double waited,
                                  Backoff& backoff);
  std::optional<Fault> find_mismatch(const ExpectedCollective& expected, double waited,
                                     bool any_order) const;
  std::optional<Fault> find_lone_gather(const ExpectedCollective& expected, double waited) const;
  std::optional<Fault> find_overdue(const ExpectedCollective& expected, double waited,
                                    Backoff& backoff);
  DeviceMonitor::Listener device_listener();
  bool is_troubled();
  bool find_on_device(const DeviceMonitor::Pending& pending);
  bool is_known_to_script() const;
  [[noreturn]] void end_process() const;
  std::vector<Report> ended(const ExpectedCollective& expected, Clock::duration grace,
                            bool with_lost = true) const;
  std::vector<Report> late(const ExpectedCollective& expected) const;
  ExpectedCollective newest_of(ExpectedCollective expected) const;
  bool warn(const ExpectedCollective& expected, double waited, bool at_last) const;
  int64_t speaker_of(const ExpectedCollective& expected, const std::vector<Report>& late) const;
  Fault fault_of(const std::vector<Report>& reports, const ExpectedCollective& expected,
                 double waited, const std::string& error) const;
  [[noreturn]] void raise(const Fault& fault);
  // Records the fault and tells the others. Returns false if this rank has given up before.
  bool give_up(const Fault& fault);
  Fault first_fault() const;
  std::string words_for(const FaultEvent& event, size_t model) const;

  Options options_;
  Interpreter interpreter_;
  int64_t process_ = getpid();  // this process; differs in a forked one
  pthread_t main_thread_{};
  int64_t rank_ = 0;
  std::vector<Member> members_;
  const std::shared_ptr<Progress> wait_scopes_ = std::make_shared<Progress>();

  mutable std::mutex mutex_;  // of what follows
  std::vector<Model> models_;
  std::map<int64_t, Neighbour> neighbours_;
  std::map<int64_t, Report> ends_;
  std::map<int64_t, Report> late_;
  Report question_;  // the last that any rank has asked
  int64_t questions_ = 0;
  bool left_ = false;
  std::atomic<bool> disturbed_{false};  // there are ends
  std::atomic<bool> failed_{false};     // there is a fault
  std::atomic<bool> delivered_{false};  // the script has the error
  std::atomic<bool> interrupted_{false};
  std::atomic<bool> survives_{false};
  std::atomic<bool> follows_{false};  // the host may be ahead of what its device waits for
  Fault fault_;                       // the first that was found

  comm::Peers peers_;
  DeviceMonitor monitor_;  // whose thread ends first
};

// A stretch of Python that all ranks enter together: a collective, a rendezvous, the creation of a
// process group.
//
// All ranks of a group reach the same wait scopes in the same order, so a rank that has reached
// fewer of them is late.
class WaitScope {
 public:
  enum class Kind : int64_t {
    kTogether,  // this rank waits for the others, each of which comes here, too
    kWrapping,  // this rank wraps a model, and waits now and then
    kApart,     // this rank may wait; others need not come here as often
  };

  // Enters the scope that errors call `label`. `ranks`: the expected ones; empty: all.
  WaitScope(std::shared_ptr<FaultWatch> watch, Kind kind, const std::string& label,
            std::vector<int64_t> ranks);

  // Checks the other ranks, called from time to time: throws if one has ended, warns of late ones.
  void look();
  // Throws if it is known which rank caused `error`, with which the backend has failed.
  void explain(const std::string& error);
  // Leaves the scope. `came`: this rank's entry counts. It does not if the scope has failed for a
  // reason of its own, which is the same on all ranks.
  void end(bool came);

 private:
  double waited() const;

  std::shared_ptr<FaultWatch> watch_;
  Kind kind_;
  ExpectedCollective expected_;
  Backoff backoff_;
  Phase before_;
  FaultWatch::Clock::time_point since_;
};

}  // namespace fastsync::engine
