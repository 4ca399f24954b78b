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

Mailbox::Mailbox(std::vector<std::shared_ptr<Segment>> segments, size_t rank,
                 std::vector<size_t> tables, std::chrono::milliseconds timeout)
    : segments_(std::move(segments)), rank_(rank), tables_(std::move(tables)), timeout_(timeout) {
  static_assert(std::atomic<uint64_t>::is_always_lock_free);
  // These begin with the zeros of fresh memory, and are not constructed again.
  static_assert(std::is_trivially_destructible_v<Table>);
}

Mailbox::Table& Mailbox::table(size_t rank) const {
  return *std::launder(reinterpret_cast<Table*>(segments_[rank]->data() + tables_[rank]));
}

void Mailbox::post(size_t tag, uint64_t number, size_t offset) {
  if (number > kPackets) {
    const uint64_t oldest = number - kPackets;
    for (size_t r = 0; r < ranks(); ++r) {
      wait_for(r, kRead, [&] { return r == rank_ || is_done(r, tag, oldest); });
    }
  }
  Slot& mine = slot(rank_, tag);
  mine.offsets.at(number % kPackets).store(offset, std::memory_order_relaxed);
  mine.numbers.at(number % kPackets).store(number);
  FutexEvent(table(0).event).notify();
}

const std::byte* Mailbox::packet(size_t tag, uint64_t number, size_t sender) {
  wait_for(sender, kSend, [&] { return has_posted(sender, tag, number); });
  const Slot& theirs = slot(sender, tag);
  FS_ASSERT(theirs.numbers.at(number % kPackets).load() == number,
            "a packet was overwritten before it was read");
  const auto offset = theirs.offsets.at(number % kPackets).load(std::memory_order_relaxed);
  return segments_[sender]->data() + offset;
}

bool Mailbox::have_posted(size_t tag, uint64_t number, std::chrono::milliseconds time,
                          FutexEvent::Clock::time_point since) {
  const auto end = FutexEvent::Clock::now() + time;
  for (size_t r = 0; r < ranks(); ++r) {
    if (r == rank_) continue;
    const auto posted = [&] { return has_posted(r, tag, number); };
    if (comes_by(end, r, kSend, posted)) continue;
    if (FutexEvent::Clock::now() >= since + timeout_) give_up(r, kSend);
    return false;
  }
  return true;
}

void Mailbox::done(size_t tag, uint64_t number) {
  std::atomic<uint64_t>& mine = slot(rank_, tag).done;
  if (mine.load() < number) mine.store(number);
  FutexEvent(table(0).event).notify();
}

bool Mailbox::is_read(size_t tag, uint64_t number) const {
  for (size_t r = 0; r < ranks(); ++r) {
    if (!is_done(r, tag, number)) return false;
  }
  return true;
}

bool Mailbox::is_read_within(size_t tag, uint64_t number, std::chrono::milliseconds time) {
  const auto end = FutexEvent::Clock::now() + time;
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
bool Mailbox::comes_by(FutexEvent::Clock::time_point end, size_t rank, const char* what,
                       const Done& done) {
  return FutexEvent(table(0).event).wait_until(done, end, [&] {
    FS_CHECK(done() || segments_[rank]->owner_lives(), "rank ", rank, " ended while rank ", rank_,
             " waited for it to ", what);
  });
}

template <class Done>
void Mailbox::wait_for(size_t rank, const char* what, const Done& done) {
  if (!comes_by(FutexEvent::Clock::now() + timeout_, rank, what, done)) give_up(rank, what);
}

void Mailbox::give_up(size_t rank, const char* what) const {
  const double seconds = std::chrono::duration<double>(timeout_).count();
  throw std::runtime_error(concat("fastsync: rank ", rank_, " waited ", seconds, " s for rank ",
                                  rank, " to ", what, ", but it did not come"));
}

}  // namespace fastsync::comm
