#include "shm/mailbox.h"

#include <new>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "check.h"

namespace fastsync::comm {
namespace {

// Actions of a rank that others wait for, as errors name them.
constexpr const char* kSend = "send a message";
constexpr const char* kRead = "read a message";

}  // namespace

Mail::Mail(std::vector<std::shared_ptr<Segment>> segments, size_t rank, std::vector<size_t> tables,
           std::chrono::milliseconds timeout)
    : segments_(std::move(segments)), rank_(rank), tables_(std::move(tables)), timeout_(timeout) {
  static_assert(std::atomic<uint64_t>::is_always_lock_free);
  // These begin with the zeros of fresh memory, and are not constructed again.
  static_assert(std::is_trivially_destructible_v<Table>);
}

Mail::Table& Mail::table(size_t rank) const {
  return *std::launder(reinterpret_cast<Table*>(segments_[rank]->data() + tables_[rank]));
}

void Mail::post(size_t tag, uint64_t number, size_t offset) {
  if (number > kLetters) {
    const uint64_t oldest = number - kLetters;
    for (size_t r = 0; r < ranks(); ++r) {
      wait_for(r, kRead, [&] { return r == rank_ || is_done(r, tag, oldest); });
    }
  }
  Box& mine = box(rank_, tag);
  mine.offsets.at(number % kLetters).store(offset, std::memory_order_relaxed);
  mine.numbers.at(number % kLetters).store(number);
  Bell(table(0).bell).ring();
}

const std::byte* Mail::letter(size_t tag, uint64_t number, size_t sender) {
  wait_for(sender, kSend, [&] { return has_posted(sender, tag, number); });
  const Box& theirs = box(sender, tag);
  FS_ASSERT(theirs.numbers.at(number % kLetters).load() == number,
            "a letter was overwritten before it was read");
  const auto offset = theirs.offsets.at(number % kLetters).load(std::memory_order_relaxed);
  return segments_[sender]->data() + offset;
}

bool Mail::have_posted(size_t tag, uint64_t number, std::chrono::milliseconds time,
                       Bell::Clock::time_point since) {
  const auto end = Bell::Clock::now() + time;
  for (size_t r = 0; r < ranks(); ++r) {
    if (r == rank_) continue;
    const auto posted = [&] { return has_posted(r, tag, number); };
    if (comes_by(end, r, kSend, posted)) continue;
    if (Bell::Clock::now() >= since + timeout_) give_up(r, kSend);
    return false;
  }
  return true;
}

void Mail::done(size_t tag, uint64_t number) {
  std::atomic<uint64_t>& mine = box(rank_, tag).done;
  if (mine.load() < number) mine.store(number);
  Bell(table(0).bell).ring();
}

bool Mail::is_read(size_t tag, uint64_t number) const {
  for (size_t r = 0; r < ranks(); ++r) {
    if (!is_done(r, tag, number)) return false;
  }
  return true;
}

bool Mail::is_read_within(size_t tag, uint64_t number, std::chrono::milliseconds time) {
  const auto end = Bell::Clock::now() + time;
  try {
    for (size_t r = 0; r < ranks(); ++r) {
      if (!comes_by(end, r, kRead, [&] { return is_done(r, tag, number); })) return false;
    }
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

template <class Done>
bool Mail::comes_by(Bell::Clock::time_point end, size_t rank, const char* what, const Done& done) {
  return Bell(table(0).bell).wait_until(done, end, [&] {
    FS_CHECK(done() || segments_[rank]->owner_lives(), "rank ", rank, " ended while rank ", rank_,
             " waited for it to ", what);
  });
}

template <class Done>
void Mail::wait_for(size_t rank, const char* what, const Done& done) {
  if (!comes_by(Bell::Clock::now() + timeout_, rank, what, done)) give_up(rank, what);
}

void Mail::give_up(size_t rank, const char* what) const {
  const double seconds = std::chrono::duration<double>(timeout_).count();
  throw std::runtime_error(concat("fastsync: rank ", rank_, " waited ", seconds, " s for rank ",
                                  rank, " to ", what, ", but it did not come"));
}

}  // namespace fastsync::comm
