// Connections between ranks for fault events, beside those that gradients take: a death shows at
// once, and an event that one rank reports reaches all.
//
// Rank r keeps a TCP connection with the ranks r ± 1, r ± 2, r ± 4, ... (modulo their number), as
// in Chord (Stoica et al., 2001): 2 log2 N at most, 27 of 10,000 ranks. Events are flooded: a rank
// that receives a new one passes it on to all neighbours, so it is everywhere after log2 N hops,
// and reaches the living ranks whichever have died.
//
// The kernel closes the connections of a process that ends, however it ends. One thread per process
// looks at them and never takes the GIL: it wakes ten times a second to say how far this rank is,
// and sleeps otherwise.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fastsync::comm {

struct PeerAddress {
  std::string host;  // of IPv4 or IPv6, in digits
  int64_t port = 0;
  uint64_t key = 0;  // what a caller has to know
};

class Peers {
 public:
  // Called on the thread.
  struct Listener {
    std::function<std::string()> heartbeat;  // what neighbours shall know of this rank
    std::function<void(int64_t rank, const std::string& heartbeat)> on_heartbeat;
    std::function<void(const std::string& event)> on_event;
    // A neighbour's connection has ended. `lost`: because nothing has been acknowledged for too
    // long.
    std::function<void(int64_t rank, bool lost)> on_closed;
  };

  // Listens on an address of this machine. Throws std::runtime_error with the system's reason.
  // `lost_after`: how long a neighbour's machine may acknowledge nothing until its connection
  // counts as closed; 0: until the system gives up.
  explicit Peers(const std::string& host, std::chrono::milliseconds lost_after = {});
  ~Peers() { close(); }
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  const PeerAddress& address() const { return address_; }
  // Connects to this rank's neighbours, whose addresses are those of `all`; every rank of them
  // listens already. Returns the ranks that could not be reached.
  std::vector<int64_t> connect(const std::vector<PeerAddress>& all, int64_t rank,
                               Listener listener);
  // Sends an event to every other rank. Any thread.
  void flood(const std::string& event);
  // Returns once all pending messages have been handed to the system, or after `timeout`. Any
  // thread but the own one.
  void flush(std::chrono::milliseconds timeout);
  // Sends pending messages, for a moment at most, and ends all connections.
  void close();
  // In a process that was forked: drops the connections, which would stay open as long as the child
  // lives.
  void abandon();

  // Ranks that `rank` calls, of so many.
  static std::vector<int64_t> called_by(int64_t rank, int64_t ranks);
  // All ranks that `rank` has connections with: those that it calls, and those that call it.
  static std::set<int64_t> neighbours_of(int64_t rank, int64_t ranks);

 private:
  using Clock = std::chrono::steady_clock;

  struct Link {
    int fd = -1;
    int64_t rank = -1;  // -1: it has not said yet
    std::string in;
    std::string out;
    Clock::time_point heard;  // from it, last
    Clock::time_point told;   // its last heartbeat
    bool lost = false;
  };

  void run();
  void wake() const;
  bool is_all_sent() const;
  bool has_unsent();
  void heartbeat();
  void take_queued();
  void accept_all();
  void read(Link& link);
  void parse(Link& link);
  void hear(Link& link, char kind, const std::string& body);
  void hear_event(const std::string& body);
  void write(Link& link);
  void drop_closed();
  void pass_on(const std::string& body);

  int64_t process_ = 0;  // this one's, to tell a forked one
  std::chrono::milliseconds lost_after_;
  int64_t rank_ = 0;
  PeerAddress address_;
  int listening_ = -1;
  int wake_ = -1;
  Listener listener_;
  std::thread thread_;
  std::atomic<bool> stop_{false};

  // Held by the thread while it looks at them, for abandon(). Locked before the queue's.
  std::mutex links_mutex_;
  std::vector<Link> links_;
  std::set<std::pair<int64_t, int64_t>> heard_;  // the thread's: origin and number of events
  std::deque<std::string> recent_;  // the thread's: events, for neighbours that come late
  std::set<int64_t> callers_;       // the thread's: neighbours whose call has not come yet
  std::mutex queue_mutex_;
  std::deque<std::string> queued_;
  int64_t told_ = 0;
};

}  // namespace fastsync::comm
