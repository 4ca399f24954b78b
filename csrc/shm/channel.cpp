#include "shm/channel.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "check.h"
#include "kernels/norm.h"

namespace fastsync::comm {
namespace {

int64_t chunk_elements(kernels::DType dtype) {
  return Channel::kChunkBytes / static_cast<int64_t>(kernels::element_size(dtype));
}

// The next value of a counter of sum `number`, in front of which others may have been counted; see
// [Note: what orders it].
uint64_t next_value(uint64_t seen, uint64_t first) { return std::max(seen, first) + 1; }

std::string list(const std::vector<size_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace

Channel::Channel(std::vector<std::shared_ptr<Segment>> segments, size_t rank,
                 std::chrono::milliseconds timeout, size_t index)
    : segments_(std::move(segments)), rank_(rank), timeout_(timeout), index_(index) {
  static_assert(sizeof(Header) <= Segment::kChannelBytes);
  FS_ASSERT(index < Segment::kChannels, "segments have room for ", Segment::kChannels, " channels");
  static_assert(std::atomic<uint64_t>::is_always_lock_free);
  // These begin with the zeros of a fresh segment, and are not constructed again.
  static_assert(std::is_trivially_destructible_v<Header>);
}

Channel::Header& Channel::header(size_t rank) const {
  return *std::launder(reinterpret_cast<Header*>(segments_[rank]->header(index_)));
}

Channel::Sum Channel::join(const Part& part) {
  return join_as({0, part, chunks_of(part.numel, part.dtype)});
}

int64_t Channel::chunks_of(int64_t numel, kernels::DType dtype) {
  const int64_t each = chunk_elements(dtype);
  return std::max<int64_t>(1, (numel + each - 1) / each);
}

Channel::Sum Channel::join_exchange(size_t offset, int64_t bytes, bool gathers) {
  const auto chunks = static_cast<int64_t>(segments_.size());
  return join_as({0, {offset, bytes, {}, 0, 0}, chunks, true, gathers});
}

int32_t Channel::kind_of(const Sum& sum) {
  if (sum.exchanges) return sum.gathers ? kGather : kExchange;
  return static_cast<int32_t>(sum.mine.dtype);
}

Channel::Sum Channel::join_as(Sum sum) {
  sum.number = ++last_;
  const Part& part = sum.mine;
  Sum& former = recent_.at(sum.number % kSlots);
  if (former.number > 0) wait(former);
  former = sum;
  Entry& mine = entry(rank_, sum.number);
  mine.offset.store(part.offset, std::memory_order_relaxed);
  mine.numel.store(part.numel, std::memory_order_relaxed);
  mine.dtype.store(kind_of(sum), std::memory_order_relaxed);
  mine.squares.store(part.squares, std::memory_order_relaxed);
  mine.squared.store(part.squared, std::memory_order_relaxed);
  mine.step.store(step_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  mine.number.store(sum.number);
  if (all_joined(sum)) notify();
  return sum;
}

bool Channel::all_joined(const Sum& sum) const {
  for (size_t r = 0; r < segments_.size(); ++r) {
    if (entry(r, sum.number).number.load() < sum.number) return false;
  }
  return true;
}

bool Channel::is_finished(const Sum& sum) const {
  const uint64_t all = (sum.number << kChunkBits) + static_cast<uint64_t>(sum.chunks);
  return common().finished.at(sum.number % kSlots).load() >= all;
}

int64_t Channel::share(const Sum& sum) const {
  const auto ranks = static_cast<int64_t>(segments_.size());
  return (sum.chunks + ranks - 1) / ranks;
}

void Channel::help(const Sum& sum, int64_t chunks) {
  if (sum.exchanges || !all_joined(sum)) return;
  for (; chunks > 0; --chunks) {
    const int64_t chunk = claim(sum);
    if (chunk < 0) return;
    add_chunk(sum, chunk);
    finish_one(sum);
  }
}

// -1: all have been claimed.
int64_t Channel::claim(const Sum& sum) {
  std::atomic<uint64_t>& counter = common().claimed.at(sum.number % kSlots);
  const uint64_t first = sum.number << kChunkBits;
  const uint64_t end = first + static_cast<uint64_t>(sum.chunks);
  uint64_t seen = counter.load();
  while (seen < end) {
    const uint64_t next = next_value(seen, first);
    if (counter.compare_exchange_weak(seen, next)) return static_cast<int64_t>(next - 1 - first);
  }
  return -1;
}

void Channel::finish_one(const Sum& sum) {
  std::atomic<uint64_t>& counter = common().finished.at(sum.number % kSlots);
  const uint64_t first = sum.number << kChunkBits;
  uint64_t seen = counter.load();
  while (!counter.compare_exchange_weak(seen, next_value(seen, first))) {
  }
  if (is_finished(sum)) notify();
}

// Claimed, so that the sum is under way and the entries stay.
void Channel::add_chunk(const Sum& sum, int64_t chunk) {
  std::vector<void*> buffers;
  for (size_t r = 0; r < segments_.size(); ++r) {
    const Entry& other = entry(r, sum.number);
    FS_CHECK(fits(other, sum), "rank ", rank_, " sums ", sum.mine.numel,
             " elements over ranks, but rank ", r, " another number or dtype",
             cause_of_misfit(sum, r));
    buffers.push_back(segments_[r]->data() + other.offset.load(std::memory_order_relaxed));
  }
  const int64_t begin = chunk * chunk_elements(sum.mine.dtype);
  const int64_t end = std::min(sum.mine.numel, begin + chunk_elements(sum.mine.dtype));
  kernels::sum_to_all_cpu(buffers.data(), buffers.size(), begin, end, sum.mine.dtype);
  tell_squares(sum, chunk, begin, end);
}

// Stores the squares of elements [begin, end), which have just been added up. Equal numbers of
// elements give every rank the same bits.
void Channel::tell_squares(const Sum& sum, int64_t chunk, int64_t begin, int64_t end) const {
  const std::byte* const mine = segments_[rank_]->data() + sum.mine.offset;
  int64_t known = -1;  // elements that `squares` is of
  double squares = 0.0;
  for (size_t r = 0; r < segments_.size(); ++r) {
    const Entry& other = entry(r, sum.number);
    const uint64_t place = other.squares.load(std::memory_order_relaxed);
    if (place == 0) continue;
    const int64_t last = std::min(end, other.squared.load(std::memory_order_relaxed));
    const int64_t wanted = std::max<int64_t>(0, last - begin);
    if (std::exchange(known, wanted) != wanted) {
      const auto bytes = static_cast<int64_t>(kernels::element_size(sum.mine.dtype));
      squares = kernels::square_sum_cpu(mine + begin * bytes, sum.mine.dtype, wanted);
    }
    std::memcpy(segments_[r]->data() + place + static_cast<size_t>(chunk) * sizeof(double),
                &squares, sizeof(double));
  }
}

bool Channel::fits(const Entry& other, const Sum& sum) const {
  return other.numel.load(std::memory_order_relaxed) == sum.mine.numel &&
         other.dtype.load(std::memory_order_relaxed) == kind_of(sum);
}

// Another rank has joined with something else: it is in another step, or has another model.
std::string Channel::cause_of_misfit(const Sum& sum, size_t rank) const {
  const int64_t mine = entry(rank_, sum.number).step.load(std::memory_order_relaxed);
  const int64_t theirs = entry(rank, sum.number).step.load(std::memory_order_relaxed);
  if (mine == theirs) return "; do they train the same model?";
  const size_t behind = mine < theirs ? rank_ : rank;
  return concat(": rank ", rank_, " is in step ", mine, ", and rank ", rank, " in step ", theirs,
                ". Either rank ", behind, " has left out a backward, or rank ",
                behind == rank ? rank_ : rank,
                " has made one more; every rank has to make as many backwards that synchronise. "
                "faults=Faults(on_skip=\"average_others\") lets ranks leave out steps");
}

const std::byte* Channel::part_of(const Sum& exchange, size_t rank) const {
  const Entry& other = entry(rank, exchange.number);
  FS_CHECK(fits(other, exchange), "rank ", rank_, " exchanges ", exchange.mine.numel,
           " bytes with the others, but rank ", rank, " others", cause_of_misfit(exchange, rank));
  return segments_[rank]->data() + other.offset.load(std::memory_order_relaxed);
}

void Channel::done_reading(const Sum& exchange) { finish_one(exchange); }

void Channel::meet(const Sum& sum, const std::string& what) {
  const auto end = Clock::now() + timeout_;
  check_in_time(sum, sleep_until(sum, [&] { return all_joined(sum); }, end), what);
}

void Channel::wait(const Sum& sum) {
  meet(sum);
  help(sum, sum.chunks);
  const auto end = Clock::now() + timeout_;
  check_in_time(sum, sleep_until(sum, [&] { return is_finished(sum); }, end));
}

void Channel::check_in_time(const Sum& sum, bool done, const std::string& what) const {
  if (done) return;
  const std::vector<size_t> late = absent(sum);
  const double seconds = std::chrono::duration<double>(timeout_).count();
  FS_CHECK(late.empty(), "rank ", rank_, " waited ", seconds, " s for ", what, ", but ", list(late),
           " did not come");
  FS_CHECK(false, "rank ", rank_, " waited ", seconds, " s for ", what,
           " that another rank has begun and does not finish");
}

bool Channel::wait_for(const Sum& sum, std::chrono::milliseconds time, Until until) {
  const auto end = Clock::now() + time;
  if (!sleep_until(sum, [&] { return all_joined(sum); }, end)) return false;
  if (until == Until::kJoined) return true;
  help(sum, sum.chunks);
  return sleep_until(sum, [&] { return is_finished(sum); }, end);
}

// A rank that has ended in good order had joined before, and left no chunk unfinished.
void Channel::check_ranks(const Sum& sum) const {
  std::vector<size_t> gone;
  for (size_t r = 0; r < segments_.size(); ++r) {
    if (!segments_[r]->owner_lives()) gone.push_back(r);
  }
  const std::vector<size_t> late = absent(sum);
  const auto joined = [&](size_t r) {
    return std::find(late.begin(), late.end(), r) == late.end();
  };
  if (!late.empty()) gone.erase(std::remove_if(gone.begin(), gone.end(), joined), gone.end());
  FS_CHECK(gone.empty() || is_finished(sum), list(gone), " ended while rank ", rank_,
           " waited for a sum over ranks");
}

std::vector<size_t> Channel::absent(const Sum& sum) const {
  std::vector<size_t> ranks;
  for (size_t r = 0; r < segments_.size(); ++r) {
    if (entry(r, sum.number).number.load() < sum.number) ranks.push_back(r);
  }
  return ranks;
}

}  // namespace fastsync::comm
