// Connections between ranks: events reach all that live, and ends are seen. Meant for
// ThreadSanitizer too.
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../comm/peers.h"
#include "harness.h"

namespace fastsync::comm {
namespace {

using std::chrono::milliseconds;

// A rank, and what it has heard.
class Rank {
 public:
  explicit Rank(const std::string& host = "127.0.0.1") : peers(host) {}

  std::vector<int64_t> connect(const std::vector<PeerAddress>& all, int64_t rank) {
    Peers::Listener listener;
    listener.heartbeat = [rank] { return std::to_string(rank); };
    listener.on_heartbeat = [this](int64_t from, const std::string& heartbeat) {
      const std::lock_guard<std::mutex> lock(mutex_);
      heartbeats_[from] = heartbeat;
    };
    listener.on_event = [this](const std::string& event) {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++events_[event];
    };
    listener.on_closed = [this](int64_t from, bool /*lost*/) {
      const std::lock_guard<std::mutex> lock(mutex_);
      closed_.insert(from);
    };
    return peers.connect(all, rank, std::move(listener));
  }

  int heard(const std::string& event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return events_[event];
  }
  std::string beat_of(int64_t rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return heartbeats_[rank];
  }
  bool saw_end_of(int64_t rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return closed_.count(rank) != 0;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, int> events_;
  std::map<int64_t, std::string> heartbeats_;
  std::set<int64_t> closed_;

 public:
  Peers peers;  // whose thread ends first
};

template <typename Condition>
bool comes_true(const Condition& condition) {
  for (int i = 0; i < 1000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(milliseconds(10));
  }
  return false;
}

std::vector<std::unique_ptr<Rank>> connected(int64_t count, const std::string& host = "127.0.0.1") {
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<PeerAddress> addresses;
  for (int64_t r = 0; r < count; ++r) {
    ranks.push_back(std::make_unique<Rank>(host));
    addresses.push_back(ranks.back()->peers.address());
  }
  for (int64_t r = 0; r < count; ++r) {
    EXPECT(ranks[static_cast<size_t>(r)]->connect(addresses, r).empty(), "");
  }
  return ranks;
}

void calls_each_neighbour_once() {
  for (int64_t ranks = 1; ranks < 70; ++ranks) {
    std::set<std::pair<int64_t, int64_t>> pairs;
    for (int64_t r = 0; r < ranks; ++r) {
      for (const int64_t other : Peers::called_by(r, ranks)) {
        EXPECT(other != r && other >= 0 && other < ranks, "");
        EXPECT(pairs.emplace(std::min(r, other), std::max(r, other)).second, "");  // once
      }
    }
    for (int64_t r = 0; ranks > 1 && r < ranks; ++r) {
      const int64_t next = (r + 1) % ranks;
      EXPECT(pairs.count({std::min(r, next), std::max(r, next)}) == 1, "");
    }
  }
  EXPECT(Peers::called_by(0, 10000).size() == 13, "");
}

void an_event_reaches_all_once() {
  for (const int64_t count : {2, 3, 4, 9}) {
    const auto ranks = connected(count);
    const auto event_of = [](const Rank& rank) {
      return concat("from ", rank.peers.address().port);
    };
    for (const auto& rank : ranks) rank->peers.flood(event_of(*rank));
    for (const auto& from : ranks) {
      const std::string event = event_of(*from);
      for (const auto& to : ranks) {
        if (to == from) continue;
        EXPECT(comes_true([&] { return to->heard(event) > 0; }), "");
        EXPECT(to->heard(event) == 1, "");
      }
    }
    EXPECT(comes_true([&] { return ranks[1]->beat_of(0) == "0"; }), "");
  }
}

void news_travels_by_ipv6() {
  try {
    const Peers probe("::1");
  } catch (const std::runtime_error&) {
    return;  // a machine without IPv6
  }
  const auto ranks = connected(3, "::1");
  ranks[1]->peers.flood("hello");
  EXPECT(comes_true([&] { return ranks[0]->heard("hello") + ranks[2]->heard("hello") == 2; }), "");
}

void a_name_is_no_address() {
  bool refused = false;
  try {
    const Peers peers("localhost");
  } catch (const std::exception&) {
    refused = true;
  }
  EXPECT(refused, "");
}

void last_words_come_before_the_end() {
  const auto ranks = connected(3);
  ranks[1]->peers.flood("I go");
  ranks[1]->peers.close();
  for (const size_t other : {0, 2}) {
    EXPECT(comes_true([&] { return ranks[other]->saw_end_of(1); }), "");
    EXPECT(ranks[other]->heard("I go") == 1, "");
  }
  ranks[0]->peers.flood("still here");
  EXPECT(comes_true([&] { return ranks[2]->heard("still here") == 1; }), "");
}

void last_words_wait_for_a_neighbour_that_is_late() {
  Rank caller;
  Rank called;
  const std::vector<PeerAddress> addresses{caller.peers.address(), called.peers.address()};
  called.connect(addresses, 1);
  called.peers.flood("I go");
  const auto closing = std::async(std::launch::async, [&] { called.peers.close(); });
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT(caller.connect(addresses, 0).empty(), "");
  EXPECT(comes_true([&] { return caller.saw_end_of(1); }), "");
  EXPECT(caller.heard("I go") == 1, "");
}

void a_stranger_is_not_heard() {
  const auto ranks = connected(2);
  Rank stranger;
  PeerAddress wrong = ranks[0]->peers.address();
  wrong.key ^= 1;
  std::vector<PeerAddress> all{stranger.peers.address(), wrong};
  stranger.connect(all, 0);
  stranger.peers.flood("lies");
  EXPECT(comes_true([&] { return stranger.saw_end_of(1); }), "");
  EXPECT(ranks[0]->heard("lies") == 0, "");
}

void a_rank_that_cannot_be_reached() {
  Rank one;
  PeerAddress nobody{"127.0.0.1", 1, 7};
  const std::vector<int64_t> missing = one.connect({one.peers.address(), nobody}, 0);
  EXPECT(missing == std::vector<int64_t>{1}, "");
}

}  // namespace
}  // namespace fastsync::comm

int main(int argc, char** argv) {
  using namespace fastsync::comm;  // NOLINT: cases only
  return fastsync::testing::run_cases(
      {{"neighbours", calls_each_neighbour_once},
       {"event", an_event_reaches_all_once},
       {"IPv6", news_travels_by_ipv6},
       {"no address", a_name_is_no_address},
       {"last words", last_words_come_before_the_end},
       {"late neighbour", last_words_wait_for_a_neighbour_that_is_late},
       {"stranger", a_stranger_is_not_heard},
       {"unreachable", a_rank_that_cannot_be_reached}},
      argc, argv);
}
