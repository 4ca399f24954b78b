// Memory that processes of one machine share.
//
// A segment is a memfd: a file without a name, so that nothing can stay behind in /dev/shm, whose
// size does not matter either. Others find it as /proc/<pid>/fd/<fd>, which the kernel opens for
// the same user alone. The file is much larger than what it holds: pages come into being when
// take() asks for them, which fails with an error where there is no memory, and go when give()
// returns them. So the others map it once, whatever is taken later.
//
// [Note: forks]
// A data loader's workers are forks of a rank, and inherit its mapping. What they do to gradients,
// which is to free them as a rule, must not reach the rank: before a fork returns in the child, the
// blocks that the rank has taken become private to the child, which copies a page when it writes
// there, and give() no longer returns pages to the system. What a child reads later is what the
// rank has written by then.
//
// [Note: warm pages]
// A fresh page costs several times what it costs to fill it, and each other rank that reads it maps
// it anew. Blocks that come and go in every step, and whose sizes differ, would find few pages
// again that were kept by block. So a segment keeps all pages from its beginning up to where its
// blocks have ended, until trim(), as long as those that no block has are no more than two blocks
// could use. Each block takes the smallest gap that is large enough, which keeps that end low.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>

namespace fastsync::comm {

// Address by which another process finds a segment.
struct SegmentAddress {
  int64_t pid = 0;
  int64_t fd = 0;
  uint64_t bytes = 0;
  uint64_t key = 0;  // stands in the segment: in another namespace the file may be a different one
};

class Segment {
 public:
  // Always there, zero-filled, in front of everything that take() returns: room for so many
  // channels' words.
  static constexpr size_t kChannels = 3;
  static constexpr size_t kChannelBytes = 32 << 10;
  static constexpr size_t kHeaderBytes = (kChannels + 1) * kChannelBytes;

  // This process's. Throws std::runtime_error with the system's reason.
  static std::shared_ptr<Segment> make(size_t bytes);
  // Another process's. Throws std::runtime_error with the system's reason.
  static std::shared_ptr<Segment> open(const SegmentAddress& address);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const SegmentAddress& address() const { return address_; }
  std::byte* data() const { return data_; }
  std::byte* header(size_t channel) const;
  // Whether the process that made it has not ended, reaped or not.
  bool owner_lives() const;

  // The owner's: a block of zeros, by its offset. Throws std::runtime_error where there is no
  // memory for it. Any thread may take and give.
  size_t take(size_t bytes);
  void give(size_t offset);
  // The block that holds this offset stays, given back or not: other ranks may read it, also once
  // this process has no segment any more, since their mappings keep its pages.
  void leave(size_t offset);
  // From here on blocks that are given back keep their pages, and take() returns what these hold:
  // see [Note: warm pages].
  void keep_pages();
  // Whether the next block of so many bytes finds pages that are kept.
  bool is_warm(size_t bytes);
  // Frees the pages behind the last block.
  void trim();

 private:
  class Forks;
  Segment(SegmentAddress address, int fd);
  void map();
  size_t place_for(size_t bytes);
  void make_pages(size_t begin, size_t end);
  void punch(size_t begin, size_t end);
  void cool(size_t end);
  size_t end_of_blocks() const;
  bool is_mine() const;
  void become_private();

  SegmentAddress address_;
  int fd_ = -1;
  int process_ = -1;  // pidfd of the owner
  std::byte* data_ = nullptr;
  std::mutex mutex_;
  std::map<size_t, size_t> taken_;  // bytes by offset
  std::set<size_t> left_;           // of these, offsets of blocks that stay
  bool keeps_ = false;
  size_t held_ = 0;       // bytes of blocks that are taken
  size_t largest_ = 0;    // of blocks that there ever were
  size_t warm_ = 0;       // where the pages end that are kept
  bool private_ = false;  // as in a forked child
};

}  // namespace fastsync::comm
