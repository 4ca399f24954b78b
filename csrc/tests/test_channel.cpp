// Sums over "ranks" that are threads of one process, each with its own mapping of every segment.
// For ThreadSanitizer too.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../kernels/sum.h"
#include "harness.h"
#include "other_process.h"
#include "shm/channel.h"

namespace fastsync::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr size_t kBytes = 64 << 20;

// One rank: its own segment and its channel.
struct Rank {
  std::shared_ptr<Segment> segment;
  std::unique_ptr<Channel> channel;

  float* floats(size_t offset) const { return reinterpret_cast<float*>(segment->data() + offset); }
};

std::vector<Rank> make_ranks(size_t count, milliseconds timeout = seconds(60)) {
  std::vector<Rank> ranks(count);
  for (Rank& rank : ranks) rank.segment = Segment::make(kBytes);
  for (size_t r = 0; r < count; ++r) {
    std::vector<std::shared_ptr<Segment>> all;
    for (size_t other = 0; other < count; ++other) all.push_back(ranks[other].segment);
    ranks[r].channel = std::make_unique<Channel>(all, r, timeout);
  }
  return ranks;
}

void on_all(std::vector<Rank>& ranks, const std::function<void(size_t, Rank&)>& body) {
  std::vector<std::string> errors(ranks.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        body(r, ranks[r]);
      } catch (const std::exception& error) {
        errors[r] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t r = 0; r < errors.size(); ++r) EXPECT(errors[r].empty(), "rank ", r, ": ", errors[r]);
}

float value_of(size_t rank, uint64_t sum, int64_t i) {
  return static_cast<float>(rank + 1) * 1e-3F * static_cast<float>(i % 97) +
         static_cast<float>(sum) * 0.37F + static_cast<float>(rank) * 1e4F;
}

// In the order of the ranks, from left to right.
float sum_of(size_t ranks, uint64_t sum, int64_t i) {
  float total = value_of(0, sum, i);
  for (size_t r = 1; r < ranks; ++r) total += value_of(r, sum, i);
  return total;
}

void expect_sum(const Rank& rank, size_t ranks, const Channel::Sum& sum) {
  const float* found = rank.floats(sum.mine.offset);
  for (int64_t i = 0; i < sum.mine.numel; ++i) {
    const float wanted = sum_of(ranks, sum.number, i);
    EXPECT(found[i] == wanted, "sum ", sum.number, ", element ", i, ": ", found[i], " for ",
           wanted);
  }
}

void fill(const Rank& rank, size_t r, size_t offset, uint64_t number, int64_t numel) {
  float* values = rank.floats(offset);
  for (int64_t i = 0; i < numel; ++i) values[i] = value_of(r, number, i);
}

// Buffers are used again at once, and results are overwritten by their owner as scripts do.
void sums_in_the_order_of_the_ranks(size_t count) {
  auto ranks = make_ranks(count);
  on_all(ranks, [&](size_t r, Rank& rank) {
    std::mt19937 random(static_cast<unsigned>(r));
    const size_t offset = rank.segment->take(1 << 20);
    for (uint64_t number = 1; number <= 60; ++number) {
      const int64_t numel = 1 + static_cast<int64_t>(number * 7919 % 200000);
      fill(rank, r, offset, number, numel);
      const Channel::Sum sum = rank.channel->join({offset, numel, kernels::DType::kFloat32});
      if (random() % 2 == 0) rank.channel->help(sum, rank.channel->share(sum));
      if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
      rank.channel->wait(sum);
      expect_sum(rank, count, sum);
      std::memset(rank.floats(offset), 0x7f, 1 << 20);
    }
  });
}

// More are under way than there are slots.
void many_are_under_way() {
  constexpr size_t kRanks = 3;
  constexpr int64_t kNumel = 500;
  auto ranks = make_ranks(kRanks);
  on_all(ranks, [&](size_t r, Rank& rank) {
    std::vector<Channel::Sum> sums;
    for (uint64_t number = 1; number <= 3 * Channel::kSlots; ++number) {
      const size_t offset = rank.segment->take(kNumel * sizeof(float));
      fill(rank, r, offset, number, kNumel);
      sums.push_back(rank.channel->join({offset, kNumel, kernels::DType::kFloat32}));
      rank.channel->help(sums.back(), r == 0 ? 0 : 1);
    }
    for (const Channel::Sum& sum : sums) {
      rank.channel->wait(sum);
      expect_sum(rank, kRanks, sum);
      rank.segment->give(sum.mine.offset);
    }
  });
}

// Sums and exchanges take turns in one channel. Some ranks do not read, and buffers are overwritten
// once all are done.
void exchanges_are_read_before_they_change() {
  constexpr size_t kRanks = 3;
  constexpr int64_t kNumel = 30000;
  auto ranks = make_ranks(kRanks);
  on_all(ranks, [&](size_t r, Rank& rank) {
    std::mt19937 random(static_cast<unsigned>(r));
    const size_t offset = rank.segment->take(kNumel * sizeof(float));
    for (uint64_t number = 1; number <= 2 * Channel::kSlots; ++number) {
      fill(rank, r, offset, number, kNumel);
      if (number % 3 == 0) {
        const Channel::Sum sum = rank.channel->join({offset, kNumel, kernels::DType::kFloat32});
        rank.channel->wait(sum);
        expect_sum(rank, kRanks, sum);
        continue;
      }
      const Channel::Sum exchange = rank.channel->join_exchange(offset, kNumel * sizeof(float));
      if (random() % 8 != 0) {
        rank.channel->meet(exchange);
        const size_t other = (r + number) % kRanks;
        const auto* theirs = reinterpret_cast<const float*>(rank.channel->part_of(exchange, other));
        for (int64_t i = 0; i < kNumel; i += 7) {
          EXPECT(theirs[i] == value_of(other, number, i), "exchange ", number, ", element ", i);
        }
      }
      rank.channel->done_reading(exchange);
      rank.channel->wait(exchange);
    }
  });
}

void channels_of_one_segment_are_apart() {
  auto ranks = make_ranks(2);
  std::vector<std::shared_ptr<Segment>> segments{ranks[0].segment, ranks[1].segment};
  on_all(ranks, [&](size_t r, Rank& rank) {
    Channel second(segments, r, seconds(60), 1);
    const size_t offset = rank.segment->take(400);
    const size_t other = rank.segment->take(400);
    fill(rank, r, offset, 1, 100);
    fill(rank, r, other, 1, 100);
    // In another order on either rank.
    const auto join = [&](Channel& channel, size_t at) {
      return channel.join({at, 100, kernels::DType::kFloat32});
    };
    const Channel::Sum here = r == 0 ? join(*rank.channel, offset) : Channel::Sum{};
    const Channel::Sum there = join(second, other);
    const Channel::Sum late = r == 0 ? here : join(*rank.channel, offset);
    second.wait(there);
    rank.channel->wait(late);
    expect_sum(rank, 2, there);
    expect_sum(rank, 2, late);
  });
}

// See [Note: forks].
void children_change_nothing() {
  const auto segment = Segment::make(kBytes);
  const size_t offset = segment->take(10000);
  std::memset(segment->data() + offset, 1, 10000);
  const pid_t child = fork();
  if (child == 0) {
    std::memset(segment->data() + offset, 2, 5000);
    const pid_t grandchild = fork();
    if (grandchild == 0) _exit(segment->data()[offset] == std::byte{2} ? 0 : 1);
    int status = 1;
    waitpid(grandchild, &status, 0);
    segment->give(offset);
    _exit(status == 0 ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  EXPECT(status == 0, "the child sees what it wrote: ", status);
  for (size_t i = 0; i < 10000; ++i) EXPECT(segment->data()[offset + i] == std::byte{1}, i);
}

// A rank that joins and never comes back holds up no other rank.
void who_waits_does_what_is_left() {
  auto ranks = make_ranks(2);
  on_all(ranks, [&](size_t r, Rank& rank) {
    const int64_t numel = 1 << 20;
    const size_t offset = rank.segment->take(numel * sizeof(float));
    fill(rank, r, offset, 1, numel);
    const Channel::Sum sum = rank.channel->join({offset, numel, kernels::DType::kFloat32});
    if (r == 1) return;
    rank.channel->wait(sum);
    expect_sum(rank, 2, sum);
  });
}

void absent_ranks_are_named() {
  auto ranks = make_ranks(3, milliseconds(300));
  const auto join = [&](size_t r) {
    const size_t offset = ranks[r].segment->take(64);
    return ranks[r].channel->join({offset, 16, kernels::DType::kFloat32});
  };
  const Channel::Sum sum = join(0);
  EXPECT(!ranks[0].channel->wait_for(sum, milliseconds(1)), "nobody came");
  join(1);
  const std::string text =
      testing::message_of<std::runtime_error>([&] { ranks[0].channel->wait(sum); });
  EXPECT(text.find("rank 0 waited 0.3 s for a sum over ranks, but rank 2 did not come") !=
             std::string::npos,
         text);
}

void dead_ranks_are_named() {
  const testing::OtherProcess other(kBytes);
  const auto mine = Segment::make(kBytes);
  Channel channel({mine, Segment::open(other.address())}, 0, seconds(60));
  const Channel::Sum sum = channel.join({mine->take(64), 16, kernels::DType::kFloat32});
  other.kill();
  const std::string text = testing::message_of<std::runtime_error>([&] { channel.wait(sum); });
  EXPECT(text.find("rank 1 ended while rank 0 waited") != std::string::npos, text);
}

void blocks_are_zeros_and_apart() {
  const auto segment = Segment::make(1 << 20);
  const size_t first = segment->take(5000);
  const size_t second = segment->take(100);
  EXPECT(second >= first + 5000, first, " and ", second);
  std::memset(segment->data() + first, 0xff, 5000);
  segment->give(first);
  EXPECT(segment->take(8000) == first, "the gap is used again");
  for (size_t i = 0; i < 8000; ++i) EXPECT(segment->data()[first + i] == std::byte{0}, i);
  const std::string text = testing::message_of<std::runtime_error>([&] { segment->take(1 << 20); });
  EXPECT(text.find("FASTSYNC_SHM=0") != std::string::npos, text);
}

bool all_are(const Segment& segment, size_t begin, size_t end, std::byte value) {
  const std::byte* const data = segment.data();
  return std::all_of(data + begin, data + end, [&](std::byte each) { return each == value; });
}

// Pages that hold what was written have been there all the time.
void kept_pages_stay_until_they_are_trimmed() {
  const auto segment = Segment::make(1 << 20);
  const size_t gap = segment->take(9000);
  const size_t table = segment->take(100);
  segment->give(gap);
  segment->keep_pages();
  const size_t end = segment->take(50000);
  const size_t small = segment->take(4096);
  EXPECT(small == gap && end > table, small, " and ", end);
  std::memset(segment->data() + end, 0xff, 50000);
  segment->give(end);
  const size_t again = segment->take(20000);
  EXPECT(again == end, again);
  segment->trim();
  EXPECT(all_are(*segment, end, end + 20000, std::byte{0xff}), "pages of a block");
  EXPECT(segment->take(20000) == end + 5 * 4096, "behind it");
  EXPECT(all_are(*segment, end + 5 * 4096, end + 40000, std::byte{0}), "pages that were free");
  segment->give(again);
  segment->give(end + 5 * 4096);
  segment->trim();
  EXPECT(segment->take(20000) == end, "the same place");
  EXPECT(all_are(*segment, end, end + 20000, std::byte{0}), "pages that no block had");
}

void strangers_are_refused() {
  const auto segment = Segment::make(1 << 20);
  SegmentAddress address = segment->address();
  ++address.key;
  const std::string text = testing::message_of<std::runtime_error>([&] { Segment::open(address); });
  EXPECT(text.find("another file") != std::string::npos, text);
}

}  // namespace
}  // namespace fastsync::comm

int main(int argc, char** argv) {
  using namespace fastsync::comm;  // NOLINT: cases only
  return fastsync::testing::run_cases({{"two", [] { sums_in_the_order_of_the_ranks(2); }},
                                       {"three", [] { sums_in_the_order_of_the_ranks(3); }},
                                       {"four", [] { sums_in_the_order_of_the_ranks(4); }},
                                       {"many", many_are_under_way},
                                       {"exchanges", exchanges_are_read_before_they_change},
                                       {"channels", channels_of_one_segment_are_apart},
                                       {"forks", children_change_nothing},
                                       {"left", who_waits_does_what_is_left},
                                       {"absent", absent_ranks_are_named},
                                       {"dead", dead_ranks_are_named},
                                       {"blocks", blocks_are_zeros_and_apart},
                                       {"pages", kept_pages_stay_until_they_are_trimmed},
                                       {"strangers", strangers_are_refused}},
                                      argc, argv);
}
