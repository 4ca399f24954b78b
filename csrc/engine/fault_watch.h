// What a rank knows of the others while it waits for them: who has ended and why, who is late and
// where.
//
// One per process group. The models of the group tell it where they stand (progress.h), connections
// between the ranks carry that and the news (comm/peers.h), and a rank that waits for a bucket asks
// in between:
//
//   ended   A rank's connections close, or it says why it leaves. Whoever waits for a collective
//           that it has not issued gets the error at once; whoever does not need it any more goes
//           on.
//   late    Who has waited for long asks. A rank that is behind answers with what it does and its
//           Python stack, which a signal handler writes without the GIL. For one that does not even
//           answer its neighbours do.
//
// Where the host does not wait, a thread beside the script asks instead: [Note: faults on a device]
// in device_monitor.h.
//
// The error is made by Python, and nothing here knows of it.
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

#include "../comm/peers.h"
#include "device_monitor.h"
#include "news.h"
#include "pace_board.h"
#include "wanted.h"

namespace fastsync::engine {

// What an error says; see fastsync.SyncFault.
struct Fault {
  std::string text;
  std::vector<int64_t> ranks;
  std::string phase;
  int64_t bucket = -1;
  std::vector<std::string> parameters;
  double seconds = 0;
  std::string reason;
  bool parts = false;  // the ranks' collectives are not the same ones, however many each has issued
};

// A rank, as the others see it.
struct Member {
  comm::PeerAddress address;
  int64_t process = 0;
  std::string machine;  // equal where process numbers mean the same
};

// How a rank leaves.
enum class Leaving : int64_t {
  kEnds,     // its script has come to its end
  kRaises,   // by an exception of its own
  kGivesUp,  // by an error that others have caused
};

class FaultWatch {
 public:
  using Clock = std::chrono::steady_clock;

  struct Options {
    double warn_after = 10;  // seconds of waiting
    double lost_after = 30;  // seconds in which another machine may acknowledge nothing
    int stack_file =
        -1;  // that a handler of `stack_signal` writes the Python stack of its thread to
    int stack_signal = 0;
  };
  struct Interpreter {
    std::function<void(const Fault&)> raise;  // throws
    std::function<void()> check_signals;      // throws where a handler of a signal raises
  };

  FaultWatch(const std::string& host, Options options, Interpreter interpreter);
  ~FaultWatch();
  FaultWatch(const FaultWatch&) = delete;
  FaultWatch& operator=(const FaultWatch&) = delete;

  const comm::PeerAddress& address() const { return peers_.address(); }
  // All ranks of the group. Returns those that could not be reached. On the thread whose stack
  // others shall see.
  std::vector<int64_t> connect(std::vector<Member> members, int64_t rank);
  // Where Python brings all ranks together: model `kPlaces`.
  Progress& places() { return *places_; }
  // A model of the group, in the order in which every rank makes them. Returns its number.
  // `board`: where it learns which ranks the others wait for; null: nowhere.
  size_t add(std::shared_ptr<const Progress> progress, Names names,
             std::shared_ptr<PaceBoard> board = nullptr);

  // Returns once `arrives`, which waits for as long as it is told, says so. Throws what the
  // interpreter raises: because a rank that is wanted has ended, or a signal has come. Warns of
  // ranks that are late.
  void wait(const Wanted& wanted, const std::function<bool(std::chrono::milliseconds)>& arrives);
  // For who waits in another way: throws where a rank that is wanted has ended, and warns when it
  // is time. `waited`: seconds.
  void look(const Wanted& wanted, double waited, Patience& patience);
  Patience new_patience() const { return {options_.warn_after}; }
  // A backend has failed with `error`: throws where it is known who is to blame. `waited`: seconds.
  void explain(const Wanted& wanted, const std::string& error, double waited);
  // From now on ranks may go on after an error of this watch. Who cannot, tells the others at once
  // that it gives up.
  void survive() { survives_ = true; }
  // Throws where a fault has been found before, by this thread or beside it: the ranks no longer
  // agree.
  void check_agreement();

  // The host does not wait for what `what` names, and `ended` says whether a device has come to its
  // end: the monitor looks out for the others meanwhile. Both are called from any thread.
  void follow(DeviceMonitor::Ended ended, DeviceMonitor::What what);
  // A communicator that a fault aborts.
  void add_communicator(comm::Communicator communicator);

  // Ranks that have ended, and in words how; perhaps not of a moment ago.
  std::vector<std::pair<int64_t, std::string>> gone() const;
  // A signal has ended a wait.
  bool is_interrupted() const { return interrupted_; }

  // Tells the others, once; `why`: in words.
  void leave(Leaving how, const std::string& why);
  // After an error that ranks have caused which end themselves: returns once those of this machine
  // have ended, and whoever started the processes has had time to see that they were first. After
  // so long at the latest.
  void outlast(std::chrono::milliseconds patience) const;
  // Ends the connections.
  void close();
  // In a process that was forked.
  void abandon() { peers_.abandon(); }

 private:
  struct Report {
    News news;
    Clock::time_point came;
  };
  struct Neighbour {
    std::vector<Standing> standings;
    Clock::time_point heard;
    bool closed = false;  // its connection
  };
  struct Model {
    std::shared_ptr<const Progress> progress;
    Names names;
    std::shared_ptr<PaceBoard> board;
  };

  std::vector<Standing> standings() const;
  std::string beat() const;
  void on_beat(int64_t rank, const std::string& bytes);
  void on_closed(int64_t rank, bool lost);
  void on_news(const std::string& bytes);
  void answer(const News& question);
  void tell(News news);
  void note(News news);
  pthread_t coder_of(size_t model) const;
  std::string stack(pthread_t thread) const;
  bool is_here(int64_t rank) const;
  static int64_t age_of(const Neighbour& neighbour);
  void find_end(int64_t rank, bool lost);
  bool find_ended(Clock::duration unheard);
  void await_end(const Wanted& wanted, const std::string& error, double waited);
  void ask(const Wanted& wanted);
  // What other ranks have done that this one need not wait for any longer; warns of late ones when
  // it is time. `newest`: the last collective that cannot end without them.
  std::optional<Fault> find_fault(const Wanted& wanted, const Wanted& newest, double waited,
                                  Patience& patience);
  std::optional<Fault> find_evaluation(const Wanted& wanted, double waited) const;
  std::optional<Fault> find_overdue(const Wanted& wanted, double waited, Patience& patience);
  DeviceMonitor::Listener device_listener();
  bool is_troubled();
  bool find_on_device(const DeviceMonitor::Pending& pending);
  bool is_known_to_script() const;
  [[noreturn]] void end_process() const;
  std::vector<Report> ended(const Wanted& wanted, Clock::duration grace,
                            bool with_lost = true) const;
  std::vector<Report> late(const Wanted& wanted) const;
  Wanted newest_of(Wanted wanted) const;
  bool warn(const Wanted& wanted, double waited, bool at_last) const;
  int64_t speaker_of(const Wanted& wanted, const std::vector<Report>& late) const;
  Fault fault_of(const std::vector<Report>& reports, const Wanted& wanted, double waited,
                 const std::string& error) const;
  [[noreturn]] void raise(const Fault& fault);
  // Tells the others, and returns true, unless this rank has given up before.
  bool give_up(const Fault& fault);
  Fault first_fault() const;
  std::string words_for(const News& news, size_t model) const;

  Options options_;
  Interpreter interpreter_;
  int64_t process_ = getpid();  // this one, to tell a forked one
  pthread_t main_thread_{};
  int64_t rank_ = 0;
  std::vector<Member> members_;
  const std::shared_ptr<Progress> places_ = std::make_shared<Progress>();

  mutable std::mutex mutex_;  // of what follows
  std::vector<Model> models_;
  std::map<int64_t, Neighbour> neighbours_;
  std::map<int64_t, Report> ends_;
  std::map<int64_t, Report> late_;
  bool left_ = false;
  std::atomic<bool> disturbed_{false};  // there are ends
  std::atomic<bool> failed_{false};     // there is a fault
  std::atomic<bool> delivered_{false};  // the script has been told
  std::atomic<bool> interrupted_{false};
  std::atomic<bool> survives_{false};
  std::atomic<bool> follows_{false};  // the host may be ahead of what its device waits for
  Fault fault_;                       // that was found first

  comm::Peers peers_;
  DeviceMonitor monitor_;  // whose thread ends first
};

}  // namespace fastsync::engine
