// Packets between the ranks of one machine, in memory that they share. No torch header.
//
// [Note: packets]
// Each rank has a table of slots, one for each tag, in its own segment. The ranks' exchanges under
// a tag have numbers, 1, 2, ...: every rank makes as many, and in the same order; exchanges under
// other tags may come in any other order. With exchange n
//
//   1. a rank posts: it writes what the others shall read, then in its slot of the tag where that
//      is, and last the number n;
//   2. it waits until each of the others has posted, and reads where they wrote;
//   3. it says in its own slot that it is done: it has read what it needed of all packets up to n,
//      or never will.
//
// A packet belongs to its readers, who may include its writer, until all ranks are done. A slot
// holds the last kPackets; who posts more waits until the oldest has been read. Numbers only grow
// and each word has one writer, so nothing is reset.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "shm/futex_event.h"
#include "shm/segment.h"

namespace fastsync::comm {

class Mailbox {
 public:
  static constexpr size_t kSlots = 1024;
  static constexpr size_t kPackets = 4;

  // A rank's slot for one tag; zeros at first.
  struct Slot {
    std::array<std::atomic<uint64_t>, kPackets> offsets;
    std::array<std::atomic<uint64_t>, kPackets> numbers;
    std::atomic<uint64_t> done;
  };
  struct Table {
    FutexEvent::Words event;  // rank 0's is notified
    std::array<Slot, kSlots> slots;
  };

  // Segments by rank, this process's among them, and where their tables lie. `timeout`: how long a
  // rank may be waited for.
  Mailbox(std::vector<std::shared_ptr<Segment>> segments, size_t rank, std::vector<size_t> tables,
          std::chrono::milliseconds timeout);

  // Others may read what stands at `offset` in this rank's segment. Throws std::runtime_error,
  // naming the ranks, where some have ended or do not read in time what was posted long before.
  void post(size_t tag, uint64_t number, size_t offset);
  // The message that another rank has posted; valid until done(). Throws as post() does.
  const std::byte* packet(size_t tag, uint64_t number, size_t sender);
  // Whether all ranks have posted, within that time. Throws as post() does, `since` being when the
  // wait began.
  bool have_posted(size_t tag, uint64_t number, std::chrono::milliseconds time,
                   FutexEvent::Clock::time_point since);
  void done(size_t tag, uint64_t number);
  // Whether no rank, this one included, reads any more what this rank has posted.
  bool is_read(size_t tag, uint64_t number) const;
  // The same, after so long at most. False where a rank has ended.
  bool is_read_within(size_t tag, uint64_t number, std::chrono::milliseconds time);
  // Whether this rank is done with it.
  bool is_done_here(size_t tag, uint64_t number) const { return is_done(rank_, tag, number); }
  size_t rank() const { return rank_; }
  size_t ranks() const { return segments_.size(); }

 private:
  Table& table(size_t rank) const;
  Slot& slot(size_t rank, size_t tag) const { return table(rank).slots.at(tag); }
  bool has_posted(size_t rank, size_t tag, uint64_t number) const {
    return slot(rank, tag).numbers.at(number % kPackets).load() >= number;
  }
  bool is_done(size_t rank, size_t tag, uint64_t number) const {
    return slot(rank, tag).done.load() >= number;
  }
  // Whether `done` has come true by `end`, for which `rank` has to do `what`. Throws if that has
  // ended.
  template <class Done>
  bool comes_by(FutexEvent::Clock::time_point end, size_t rank, const char* what, const Done& done);
  template <class Done>
  void wait_for(size_t rank, const char* what, const Done& done);
  [[noreturn]] void give_up(size_t rank, const char* what) const;

  std::vector<std::shared_ptr<Segment>> segments_;
  size_t rank_;
  std::vector<size_t> tables_;
  std::chrono::milliseconds timeout_;
};

}  // namespace fastsync::comm
