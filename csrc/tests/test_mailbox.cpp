// Packets between "ranks" that are threads of one process, each with its own mapping of every
// segment. For ThreadSanitizer too.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "harness.h"
#include "other_process.h"
#include "shm/mailbox.h"

namespace fastsync::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr size_t kBytes = 64 << 20;
constexpr size_t kWords = 300;  // of a packet

struct Rank {
  std::shared_ptr<Segment> segment;
  std::unique_ptr<Mailbox> mailbox;
};

std::vector<Rank> make_ranks(size_t count, milliseconds timeout = seconds(60)) {
  std::vector<Rank> ranks(count);
  std::vector<std::shared_ptr<Segment>> all;
  std::vector<size_t> tables;
  for (Rank& rank : ranks) {
    rank.segment = Segment::make(kBytes);
    all.push_back(rank.segment);
    tables.push_back(rank.segment->take(sizeof(Mailbox::Table)));
  }
  for (size_t r = 0; r < count; ++r) {
    ranks[r].mailbox = std::make_unique<Mailbox>(all, r, tables, timeout);
  }
  return ranks;
}

uint64_t word_of(size_t rank, size_t tag, uint64_t number, size_t i) {
  return ((rank * 31 + tag) * 1009 + number) * 4001 + i;
}

// A rank's exchanges: each posts a packet, and reads those of the others some exchanges later, or
// never.
class Exchanges {
 public:
  Exchanges(Rank& rank, size_t self)
      : segment_(*rank.segment), mailbox_(*rank.mailbox), self_(self) {}

  void post(size_t tag, uint64_t number) {
    reuse();
    const size_t offset = place();
    auto* const words = reinterpret_cast<uint64_t*>(segment_.data() + offset);
    for (size_t i = 0; i < kWords; ++i) words[i] = word_of(self_, tag, number, i);
    mailbox_.post(tag, number, offset);
    posted_.push_back({tag, number, offset});
  }

  void read(size_t tag, uint64_t number) {
    for (size_t r = 0; r < mailbox_.ranks(); ++r) {
      const auto* const words = reinterpret_cast<const uint64_t*>(mailbox_.packet(tag, number, r));
      for (size_t i = 0; i < kWords; ++i) {
        EXPECT(words[i] == word_of(r, tag, number, i), "tag ", tag, ", packet ", number);
      }
    }
    mailbox_.done(tag, number);
  }

 private:
  struct Posted {
    size_t tag;
    uint64_t number;
    size_t offset;
  };

  // Slots that all ranks have read are written to again, at once.
  void reuse() {
    for (auto posted = posted_.begin(); posted != posted_.end();) {
      if (mailbox_.is_read(posted->tag, posted->number)) {
        free_.push_back(posted->offset);
        posted = posted_.erase(posted);
      } else {
        ++posted;
      }
    }
  }

  size_t place() {
    if (free_.empty()) return segment_.take(kWords * sizeof(uint64_t));
    const size_t offset = free_.back();
    free_.pop_back();
    return offset;
  }

  Segment& segment_;
  Mailbox& mailbox_;
  size_t self_;
  std::deque<Posted> posted_;
  std::vector<size_t> free_;
};

struct Order {
  size_t tag;
  uint64_t number;
};

// Tags in an order that all ranks have in common, as units have, but each rank exchanges some
// neighbours.
std::vector<Order> orders_of(size_t rank, size_t count) {
  std::mt19937 common(7);
  std::vector<Order> orders;
  std::vector<uint64_t> numbers(5, 0);
  for (size_t i = 0; i < count; ++i) {
    const size_t tag = common() % numbers.size();
    orders.push_back({tag * 200, ++numbers[tag]});
  }
  std::mt19937 own(static_cast<unsigned>(rank));
  for (size_t i = 1; i < count; i += 2) {
    if (orders[i].tag != orders[i - 1].tag && own() % 2 == 0) std::swap(orders[i], orders[i - 1]);
  }
  return orders;
}

void letters_are_those_of_their_tag_and_number(size_t count) {
  constexpr size_t kExchanges = 2000;
  constexpr size_t kAhead = 3;  // posted before the first of them is read
  auto ranks = make_ranks(count);
  std::vector<std::string> errors(count);
  std::vector<std::thread> threads;
  for (size_t r = 0; r < count; ++r) {
    threads.emplace_back([&, r] {
      try {
        Exchanges exchanges(ranks[r], r);
        const auto orders = orders_of(r, kExchanges);
        for (size_t i = 0; i < orders.size() + kAhead; ++i) {
          if (i < orders.size()) exchanges.post(orders[i].tag, orders[i].number);
          if (i >= kAhead) exchanges.read(orders[i - kAhead].tag, orders[i - kAhead].number);
        }
      } catch (const std::exception& error) {
        errors[r] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t r = 0; r < count; ++r) EXPECT(errors[r].empty(), "rank ", r, ": ", errors[r]);
}

void a_letter_is_kept_until_all_are_done() {
  auto ranks = make_ranks(3);
  const size_t offset = ranks[0].segment->take(8);
  ranks[0].mailbox->post(4, 1, offset);
  EXPECT(!ranks[0].mailbox->is_read(4, 1), "nobody has read it");
  ranks[1].mailbox->packet(4, 1, 0);
  ranks[1].mailbox->done(4, 1);
  EXPECT(!ranks[0].mailbox->is_read(4, 1), "rank 2 has not read it");
  ranks[2].mailbox->done(4, 1);  // it never will
  EXPECT(!ranks[0].mailbox->is_read(4, 1), "rank 0 reads what it has written itself");
  EXPECT(!ranks[0].mailbox->is_done_here(4, 1), "likewise");
  ranks[0].mailbox->done(4, 1);
  EXPECT(ranks[0].mailbox->is_read(4, 1), "all are done");
}

void reading_is_waited_for_a_moment() {
  auto ranks = make_ranks(2);
  ranks[0].mailbox->post(4, 1, ranks[0].segment->take(8));
  ranks[0].mailbox->done(4, 1);
  EXPECT(!ranks[0].mailbox->is_read_within(4, 1, milliseconds(20)), "rank 1 has not read it");
  std::thread other([&] {
    std::this_thread::sleep_for(milliseconds(50));
    ranks[1].mailbox->done(4, 1);
  });
  EXPECT(ranks[0].mailbox->is_read_within(4, 1, seconds(60)), "meanwhile it has");
  other.join();
}

void a_rank_that_does_not_read_is_waited_for() {
  auto ranks = make_ranks(2, milliseconds(300));
  const size_t offset = ranks[0].segment->take(8);
  for (uint64_t n = 1; n <= Mailbox::kPackets; ++n) ranks[0].mailbox->post(0, n, offset);
  const auto post = [&] { ranks[0].mailbox->post(0, Mailbox::kPackets + 1, offset); };
  const std::string text = testing::message_of<std::runtime_error>(post);
  EXPECT(text.find("rank 0 waited 0.3 s for rank 1 to read a message") != std::string::npos, text);
  ranks[1].mailbox->done(0, 1);
  post();
}

void a_rank_that_does_not_send_is_named() {
  auto ranks = make_ranks(3, milliseconds(300));
  ranks[1].mailbox->post(2, 1, ranks[1].segment->take(8));
  ranks[0].mailbox->packet(2, 1, 1);
  const std::string text =
      testing::message_of<std::runtime_error>([&] { ranks[0].mailbox->packet(2, 1, 2); });
  EXPECT(text.find("rank 0 waited 0.3 s for rank 2 to send a message") != std::string::npos, text);
}

void dead_ranks_are_named() {
  const testing::OtherProcess other(kBytes);
  const auto mine = Segment::make(kBytes);
  const size_t table = mine->take(sizeof(Mailbox::Table));
  Mailbox mailbox({mine, Segment::open(other.address())}, 0, {table, Segment::kHeaderBytes},
                  seconds(60));
  other.kill();
  mailbox.done(0, 1);
  EXPECT(!mailbox.is_read_within(0, 1, seconds(60)), "it never will be");
  const std::string text =
      testing::message_of<std::runtime_error>([&] { mailbox.packet(0, 1, 1); });
  EXPECT(
      text.find("rank 1 ended while rank 0 waited for it to send a message") != std::string::npos,
      text);
}

}  // namespace
}  // namespace fastsync::comm

int main(int argc, char** argv) {
  using namespace fastsync::comm;  // NOLINT: cases only
  return fastsync::testing::run_cases(
      {{"two", [] { letters_are_those_of_their_tag_and_number(2); }},
       {"three", [] { letters_are_those_of_their_tag_and_number(3); }},
       {"kept", a_letter_is_kept_until_all_are_done},
       {"moment", reading_is_waited_for_a_moment},
       {"full", a_rank_that_does_not_read_is_waited_for},
       {"absent", a_rank_that_does_not_send_is_named},
       {"dead", dead_ranks_are_named}},
      argc, argv);
}
