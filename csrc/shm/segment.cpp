#include "shm/segment.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <random>
#include <set>
#include <string>
#include <utility>

#include "check.h"

// Headers may be older than the kernel.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace fastsync::comm {
namespace {

constexpr size_t kPage = 4096;

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(concat(what, ": ", std::strerror(errno)));
}

// Pages of [offset, offset + bytes), so that writing to them cannot fail.
bool reserve(int fd, size_t offset, size_t bytes) {
  int result = 0;
  do {
    result = fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

uint64_t random_key() {
  std::random_device random;
  return (uint64_t{random()} << 32) | random();
}

}  // namespace

// The segments of this process, and what becomes of them in a child: see [Note: forks]. Never
// destroyed: a process may fork while it ends.
class Segment::Forks {
 public:
  static Forks& of_process() {
    static Forks* const forks = new Forks;
    return *forks;
  }

  void add(Segment* segment) {
    const std::lock_guard<std::mutex> lock(mutex_);
    segments_.insert(segment);
  }
  void remove(Segment* segment) {
    const std::lock_guard<std::mutex> lock(mutex_);
    segments_.erase(segment);
  }

 private:
  Forks() { pthread_atfork(before, in_parent, in_child); }

  // Locked while the process forks, so that the child finds no block half taken.
  static void before() {
    of_process().mutex_.lock();
    for (Segment* segment : of_process().segments_) segment->mutex_.lock();
  }
  static void in_parent() {
    for (Segment* segment : of_process().segments_) segment->mutex_.unlock();
    of_process().mutex_.unlock();
  }
  static void in_child() {
    for (Segment* segment : of_process().segments_) segment->become_private();
    in_parent();
  }

  std::mutex mutex_;
  std::set<Segment*> segments_;
};

Segment::Segment(SegmentAddress address, int fd) : address_(address), fd_(fd) {
  if (is_mine()) Forks::of_process().add(this);
}

Segment::~Segment() {
  Forks::of_process().remove(this);
  if (data_ != nullptr) munmap(data_, address_.bytes);
  if (process_ >= 0) close(process_);
  if (fd_ >= 0) close(fd_);
}

std::shared_ptr<Segment> Segment::make(size_t bytes) {
  const int fd = memfd_create("fastsync", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) fail("memfd_create");
  const SegmentAddress address{getpid(), fd, whole_pages(bytes), random_key()};
  const std::shared_ptr<Segment> segment(new Segment(address, fd));
  if (fchmod(fd, 0600) != 0) fail("fchmod");
  if (ftruncate(fd, static_cast<off_t>(address.bytes)) != 0) fail("ftruncate");
  if (!reserve(fd, 0, kHeaderBytes)) fail("fallocate");
  // No process can remove pages that another one maps.
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) fail("sealing");
  segment->map();
  std::memcpy(segment->data_, &address.key, sizeof address.key);
  return segment;
}

std::shared_ptr<Segment> Segment::open(const SegmentAddress& address) {
  const std::string path = concat("/proc/", address.pid, "/fd/", address.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) fail(path);
  const std::shared_ptr<Segment> segment(new Segment(address, fd));
  uint64_t key = 0;
  const bool same = pread(fd, &key, sizeof key, 0) == sizeof key && key == address.key;
  if (!same) throw std::runtime_error(concat(path, " is another file"));
  segment->map();
  close(fd);
  segment->fd_ = -1;
  return segment;
}

void Segment::map() {
  void* const memory =
      mmap(nullptr, address_.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
  if (memory == MAP_FAILED) fail("mmap");
  data_ = static_cast<std::byte*>(memory);
  madvise(data_, address_.bytes, MADV_DONTDUMP);  // a core dump would read all of it
  process_ = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(address_.pid), 0));
  if (process_ < 0) fail("pidfd_open");
}

// The key stands in front of the first one.
std::byte* Segment::header(size_t channel) const { return data_ + (channel + 1) * kChannelBytes; }

bool Segment::owner_lives() const {
  pollfd end{process_, POLLIN, 0};
  return poll(&end, 1, 0) <= 0;
}

bool Segment::is_mine() const { return address_.pid == getpid(); }

// In a forked child. A child of that one has its parent's pages.
void Segment::become_private() {
  if (std::exchange(private_, true)) return;
  for (const auto& [offset, bytes] : taken_) {
    std::byte* const block = data_ + offset;
    const void* const copy =
        mmap(block, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd_,
             static_cast<off_t>(offset));
    // If there is no memory for copies, a write ends the child rather than change the rank's
    // gradients.
    if (copy == MAP_FAILED) mprotect(block, bytes, PROT_READ);
  }
}

// The smallest gap that is large enough: a small block in a larger one's gap would force that one
// elsewhere. Under the lock.
size_t Segment::place_for(size_t bytes) {
  size_t offset = end_of_blocks(), before = kHeaderBytes, smallest = SIZE_MAX;
  for (const auto& [begin, length] : taken_) {
    const size_t gap = begin - before;
    if (gap >= bytes && gap < smallest) {
      smallest = gap;
      offset = before;
    }
    before = begin + length;
  }
  FS_CHECK(offset + bytes <= address_.bytes, "the ", address_.bytes >> 20,
           " MiB that a rank may share with others are taken; are gradients of many steps kept? "
           "FASTSYNC_SHM=0 does without");
  return offset;
}

bool Segment::is_warm(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return place_for(bytes) + bytes <= warm_;
}

// Under the lock.
void Segment::make_pages(size_t begin, size_t end) {
  if (begin >= end) return;
  FS_CHECK(reserve(fd_, begin, end - begin), "no memory for ", (end - begin) >> 10,
           " KiB that ranks share: ", std::strerror(errno), "; FASTSYNC_SHM=0 does without");
  madvise(data_ + begin, end - begin,
          MADV_POPULATE_WRITE);  // otherwise page by page, when they are used
}

void Segment::punch(size_t begin, size_t end) {
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
            static_cast<off_t>(end - begin));
}

// Pages from `end` on are not kept. Under the lock.
void Segment::cool(size_t end) {
  if (end >= warm_) return;
  punch(end, warm_);
  warm_ = end;
}

size_t Segment::end_of_blocks() const {
  return taken_.empty() ? kHeaderBytes : taken_.rbegin()->first + taken_.rbegin()->second;
}

size_t Segment::take(size_t bytes) {
  const size_t wanted = whole_pages(bytes == 0 ? 1 : bytes);
  FS_CHECK(is_mine(), "a forked process cannot take memory that the ranks share");
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t offset = place_for(wanted);
  make_pages(std::max(offset, warm_), offset + wanted);
  taken_.emplace(offset, wanted);
  held_ += wanted;
  largest_ = std::max(largest_, wanted);
  if (keeps_) warm_ = std::max(warm_, offset + wanted);
  return offset;
}

void Segment::give(size_t offset) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto block = taken_.find(offset);
  if (block == taken_.end() || left_.count(offset) > 0 || !is_mine()) return;
  const size_t bytes = block->second;
  taken_.erase(block);
  held_ -= bytes;
  if (!keeps_) return punch(offset, offset + bytes);
  const size_t free = warm_ - kHeaderBytes - held_;
  if (free > 2 * largest_) cool(std::max(end_of_blocks(), warm_ - (free - 2 * largest_)));
}

void Segment::leave(size_t offset) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto behind = taken_.upper_bound(offset);
  if (behind != taken_.begin()) left_.insert(std::prev(behind)->first);
}

void Segment::keep_pages() {
  const std::lock_guard<std::mutex> lock(mutex_);
  size_t end = kHeaderBytes;
  for (const auto& [begin, length] : taken_) {  // no gap lacks its pages
    make_pages(end, begin);
    end = begin + length;
  }
  keeps_ = true;
  warm_ = end;
}

void Segment::trim() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (keeps_ && is_mine()) cool(end_of_blocks());
}

}  // namespace fastsync::comm
