// Sums over the ranks of one machine, and exchanges between them, in memory that they share. No
// torch header.
//
// [Note: who writes what]
// Each rank has a segment with its own buffers, which the others map. A sum over ranks works in
// place on one buffer of each:
//
//   1. A rank writes its buffer, then join()s: it stores offset and length in its entry for this
//      sum, and last the sum's number. From now on the rank leaves the buffer alone.
//   2. Once all ranks have joined, the buffers are shared by all, and cut into chunks. Any rank may
//      claim a chunk at any time. It reads the chunk in all buffers, adds in the order of the
//      ranks, and writes the result to all buffers.
//   3. When all chunks are finished, each rank's buffer is its own again, and holds the sum. No
//      other rank touches it until the rank joins with it once more.
//
// So a buffer has one writer at any time: its rank outside of a sum, and inside the rank that
// claimed the chunk. No other rank sees what a script does to gradients between steps. The bits of
// a chunk do not depend on the rank that computes it.
//
// A rank may ask for the sums of the squares of the results: the rank that has added a chunk up,
// which is in its caches then, writes the chunk's sum to those that ask.
//
// In an exchange no shared memory is written. Each rank joins with what the others may read, copies
// what it needs of theirs into memory of its own, and says that it has read. When all have, each
// buffer is its own rank's again.
//
// [Note: what orders it]
// Sums and exchanges have numbers, 1, 2, ..., the same on all ranks, because all join in the same
// order. Sum n uses slot n mod kSlots:
//
//   entries[slot].number  in each rank's segment, written by this rank alone: it has joined
//   claimed[slot]         in rank 0's segment: number << kChunkBits | chunks that have been claimed
//   finished[slot]        likewise: chunks that have been finished; of an exchange, ranks that have
//                         read
//
// The counters carry the number, so they need no reset, and a rank that comes late finds that the
// sum is over. They only grow, by compare-and-swap. A rank joins sum n once n - kSlots is finished:
// then the entries of that sum are not read any more, and no rank is ahead of another by more than
// kSlots.
//
// A sum ends without ranks that do not come back: a rank that waits does what is left. A rank that
// failed after it joined delays no other rank. An exchange ends when every rank has said that it
// has read, or will not.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/pack.h"
#include "kernels/sum.h"
#include "shm/futex_event.h"
#include "shm/segment.h"

namespace fastsync::comm {

class Channel {
 public:
  static constexpr uint64_t kSlots = 256;
  static constexpr int64_t kChunkBytes = kernels::kSumChunk;

  // A rank's part of a sum.
  struct Part {
    size_t offset = 0;  // in this rank's segment
    int64_t numel = 0;  // these are the same on all ranks
    kernels::DType dtype = kernels::DType::kFloat32;
    // Offset in this rank's segment for the squares of the first `squared` elements: an fp64 for
    // each chunk. 0: not wanted.
    size_t squares = 0;
    int64_t squared = 0;
  };
  struct Sum {
    uint64_t number = 0;
    Part mine;
    int64_t chunks = 0;
    bool exchanges = false;
    bool gathers = false;  // the exchange
  };

  // Segments by rank, this process's among them. `timeout`: how long a rank may be waited for;
  // `index`: channels of the same segments know nothing of each other.
  Channel(std::vector<std::shared_ptr<Segment>> segments, size_t rank,
          std::chrono::milliseconds timeout, size_t index = 0);

  // The number of chunks of a sum of so many elements.
  static int64_t chunks_of(int64_t numel, kernels::DType dtype);

  // Sums that are joined from now on belong to this step, which errors name.
  void begin_step(int64_t number) { step_.store(number, std::memory_order_relaxed); }
  // The next sum. One thread at a time.
  Sum join(const Part& part);
  // The next exchange, by one thread at a time, too: of so many bytes on every rank, which stand at
  // `offset` in this rank's segment. One that gathers does not fit others.
  Sum join_exchange(size_t offset, int64_t bytes, bool gathers = false);
  // The part that a rank has joined the exchange with. Call it once all have joined, and before
  // this rank's done_reading().
  const std::byte* part_of(const Sum& exchange, size_t rank) const;
  void done_reading(const Sum& exchange);
  bool all_joined(const Sum& sum) const;
  bool is_finished(const Sum& sum) const;
  // Works on `chunks` of it at most, where all have joined. Several threads may help.
  void help(const Sum& sum, int64_t chunks);
  // This rank's fair part of the work.
  int64_t share(const Sum& sum) const;
  // Returns once all have joined. Throws std::runtime_error, naming the ranks, where some have
  // ended or did not come in time. `what`: that they are waited for, as it reads in the error.
  void meet(const Sum& sum, const std::string& what = "a sum over ranks");
  // Returns once it is finished, and does what is left of a sum for that. Throws as meet() does.
  void wait(const Sum& sum);
  // Throws as wait() does where time is up.
  void give_up(const Sum& sum) const { check_in_time(sum, false); }
  std::chrono::milliseconds timeout() const { return timeout_; }
  // Whether that has come true, after so long at most.
  enum class Until { kJoined, kFinished };
  bool wait_for(const Sum& sum, std::chrono::milliseconds time, Until until = Until::kFinished);
  size_t ranks() const { return segments_.size(); }

 private:
  using Clock = FutexEvent::Clock;
  static constexpr int kChunkBits = 24;

  struct alignas(64) Entry {
    std::atomic<uint64_t> number;
    std::atomic<uint64_t> offset;
    std::atomic<int64_t> numel;
    std::atomic<int32_t> dtype;
    std::atomic<uint64_t> squares;
    std::atomic<int64_t> squared;
    std::atomic<int64_t> step;
  };
  // At the beginning of each segment; all but the entries is used in rank 0's alone.
  struct Header {
    std::array<Entry, kSlots> entries;
    std::array<std::atomic<uint64_t>, kSlots> claimed;
    std::array<std::atomic<uint64_t>, kSlots> finished;
    FutexEvent::Words event;
  };

  Header& header(size_t rank) const;
  Header& common() const { return header(0); }
  Entry& entry(size_t rank, uint64_t number) const {
    return header(rank).entries.at(number % kSlots);
  }
  static constexpr int32_t kExchange = -1;  // in place of a dtype
  static constexpr int32_t kGather = -2;

  static int32_t kind_of(const Sum& sum);
  Sum join_as(Sum sum);
  bool fits(const Entry& other, const Sum& sum) const;
  std::string cause_of_misfit(const Sum& sum, size_t rank) const;
  int64_t claim(const Sum& sum);
  void finish_one(const Sum& sum);
  void add_chunk(const Sum& sum, int64_t chunk);
  void tell_squares(const Sum& sum, int64_t chunk, int64_t begin, int64_t end) const;
  void notify() { FutexEvent(common().event).notify(); }
  void check_in_time(const Sum& sum, bool done, const std::string& what = "a sum over ranks") const;
  // Returns whether `done` has come true.
  template <class Done>
  bool sleep_until(const Sum& sum, const Done& done, Clock::time_point end) {
    return FutexEvent(common().event).wait_until(done, end, [&] { check_ranks(sum); });
  }
  void check_ranks(const Sum& sum) const;
  std::vector<size_t> absent(const Sum& sum) const;

  std::vector<std::shared_ptr<Segment>> segments_;
  size_t rank_;
  std::chrono::milliseconds timeout_;
  size_t index_;
  uint64_t last_ = 0;
  std::array<Sum, kSlots> recent_;  // by slot
  std::atomic<int64_t> step_{0};    // that what is joined belongs to
};

}  // namespace fastsync::comm
