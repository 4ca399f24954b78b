#include "device.h"

#include <ATen/Parallel.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <unordered_map>

namespace simulated {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kArena = size_t{32} << 30;  // addresses, not memory
constexpr int kDevices = 2;
constexpr int kPool = 32;  // streams that a program gets before it gets one again, as CUDA's

// Origin of a task, or of a block of memory.
struct Origin {
  std::string name;
  std::string where;
  size_t stream;
};

struct Pending {
  Task task;
  Clock clock;
  std::shared_ptr<const Origin> origin;
  uint64_t order;
};

struct Queue final : CUstream_st {
  Queue(size_t index, c10::DeviceIndex device, c10::StreamId id)
      : index(index), device(device), id(id) {}
  void launch(const char* name, Kernel run) override;

  const size_t index;  // of the clock
  const c10::DeviceIndex device;
  const c10::StreamId id;  // on its device
  Clock clock;
  std::deque<Pending> tasks;
  bool busy = false;
  double eager = 1;
};

struct Block {
  char* data;
  size_t pages;
  size_t asked;
  Queue* home;
  std::set<Queue*> used = {};
  std::vector<Moment> moments = {};
  Clock after = {};  // of those who used it
  std::string where = {};
};

struct PinnedBlock {
  size_t bytes;
  std::vector<Moment> moments;
  bool freed = false;
};

// One task's use of a part of a page.
struct Access {
  uint32_t epoch;
  uint16_t first, last;
  bool written;
  std::shared_ptr<const Origin> origin;
};

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

uint32_t count_of(const Clock& clock, size_t stream) {
  return stream < clock.size() ? clock[stream] : 0;
}

thread_local bool runs_tasks = false;
thread_local c10::DeviceIndex current_device = 0;
thread_local Queue* current_queue[kDevices] = {};

// Finds accesses to the same memory that nothing orders. Memory is closed; a task that touches a
// page faults, which opens the page and notes it, for reading first and then for writing. After the
// task the pages are closed, and what it touched is compared with what others have touched before.
class Detector {
 public:
  explicit Detector(char* arena) : arena_(arena), open_(kArena / kPage) {}

  void start() {
    struct sigaction action = {};
    action.sa_sigaction = &Detector::on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    the_ = this;
    sigaction(SIGSEGV, &action, &former_);
    mprotect(arena_, kArena, PROT_NONE);
    on_ = true;
  }

  void stop() {
    if (!on_) return;
    on_ = false;
    mprotect(arena_, kArena, PROT_READ | PROT_WRITE);
    sigaction(SIGSEGV, &former_, nullptr);
    pages_.clear();
  }

  bool on() const { return on_; }

  void before(const Task& task) {
    for (const Range& range : task.ranges) {
      if (!range.surely || range.bytes == 0 || !inside(range.begin)) continue;
      const size_t first = page_of(range.begin);
      const size_t last = page_of(static_cast<const char*>(range.begin) + range.bytes - 1);
      open(first, last + 1 - first, range.written ? 2 : 1);
    }
  }

  template <class Found>
  void after(const Pending& done, const Found& found) {
    for (const size_t page : touched_) {
      for (const Access& access : accesses(done, page, open_[page] == 2)) {
        compare(page, access, done.clock, found);
      }
    }
    std::sort(touched_.begin(), touched_.end());
    for (size_t i = 0, end; i < touched_.size(); i = end) {  // neighbours at once
      for (end = i + 1; end < touched_.size() && touched_[end] == touched_[end - 1] + 1;) ++end;
      mprotect(arena_ + touched_[i] * kPage, (end - i) * kPage, PROT_NONE);
      for (size_t k = i; k < end; ++k) open_[touched_[k]] = 0;
    }
    touched_.clear();
  }

 private:
  static void on_fault(int signal, siginfo_t* info, void* context) {
    if (runs_tasks && the_->inside(info->si_addr)) {
      const size_t page = the_->page_of(info->si_addr);
      if (the_->open_[page] < 2) return the_->open(page, 1, the_->open_[page] + 1);
    } else if (the_->inside(info->si_addr)) {
      static const char text[] = "the host has touched memory of the simulated device\n";
      if (write(2, text, sizeof text - 1) < 0) _exit(3);
    }
    sigaction(SIGSEGV, &the_->former_, nullptr);  // and the instruction faults again
  }

  bool inside(const void* address) const {
    const auto* at = static_cast<const char*>(address);
    return at >= arena_ && at < arena_ + kArena;
  }

  size_t page_of(const void* address) const {
    return static_cast<size_t>(static_cast<const char*>(address) - arena_) / kPage;
  }

  void open(size_t first, size_t count, uint8_t mode) {
    bool change = false;
    for (size_t page = first; page < first + count; ++page) {
      if (open_[page] == 0) touched_.push_back(page);
      change |= open_[page] < mode;
      open_[page] = std::max(open_[page], mode);
    }
    if (!change) return;
    const int protection = mode == 2 ? PROT_READ | PROT_WRITE : PROT_READ;
    mprotect(arena_ + first * kPage, count * kPage, protection);
  }

  // The parts of a page that a task has named; otherwise all of the page.
  std::vector<Access> accesses(const Pending& done, size_t page, bool written) const {
    const char* begin = arena_ + page * kPage;
    std::vector<Access> found;
    const auto add = [&](const Range& range) {
      const auto* from = std::max(static_cast<const char*>(range.begin), begin);
      const auto* to = std::min(static_cast<const char*>(range.begin) + range.bytes, begin + kPage);
      if (from >= to) return;
      found.push_back({count_of(done.clock, done.origin->stream),
                       static_cast<uint16_t>(from - begin), static_cast<uint16_t>(to - begin - 1),
                       range.written && written, done.origin});
    };
    for (const Range& range : done.task.ranges) add(range);
    if (done.task.found) std::for_each(done.task.found->begin(), done.task.found->end(), add);
    if (found.empty()) {
      found.push_back(
          {count_of(done.clock, done.origin->stream), 0, kPage - 1, written, done.origin});
    }
    return found;
  }

  template <class Found>
  void compare(size_t page, const Access& now, const Clock& clock, const Found& found) {
    std::vector<Access>& before = pages_[page];
    size_t kept = 0;
    for (Access& old : before) {
      const bool apart = old.last < now.first || now.last < old.first;
      const bool ordered = count_of(clock, old.origin->stream) >= old.epoch;
      if (!apart && !ordered && (old.written || now.written)) {
        found(arena_ + page * kPage + std::max(old.first, now.first), old, now);
      }
      // An access ordered after this one is ordered after the other too.
      const bool covered = now.first <= old.first && old.last <= now.last;
      if (ordered && covered && (now.written || !old.written)) continue;
      if (&before[kept] != &old) before[kept] = std::move(old);
      ++kept;
    }
    before.resize(kept, now);
    before.push_back(now);
  }

  static inline Detector* the_ = nullptr;
  char* const arena_;
  std::vector<uint8_t> open_;  // by page: closed, for reading, for writing
  std::vector<size_t> touched_;
  std::unordered_map<size_t, std::vector<Access>> pages_;
  struct sigaction former_ = {};
  std::atomic<bool> on_{false};
};

class Runtime {
 public:
  static Runtime& the() {
    static auto* runtime = new Runtime;
    return *runtime;
  }

  Queue* queue_of(c10::Stream stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return streams_.at(static_cast<size_t>(stream.device_index()))
        .at(static_cast<size_t>(stream.id()));
  }

  static c10::Stream stream_of(const Queue* queue) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, queue->device), queue->id);
  }

  c10::Stream default_stream(c10::DeviceIndex device) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), 0);
  }

  c10::Stream new_stream(c10::DeviceIndex device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& streams = streams_.at(static_cast<size_t>(device));
    const size_t made = handed_out_[device]++;
    if (made < kPool) add_stream(device);
    return stream_of(streams[1 + made % kPool]);
  }

  void enqueue(Queue* queue, Task task) {
    check_failure();
    const std::string where = asks_where() ? switches().where() : "";
    const std::lock_guard<std::mutex> lock(mutex_);
    ++report_.launches;
    push(queue, std::move(task), where);
  }

  Moment record(Queue* queue) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return point(queue);
  }

  void wait(Queue* queue, const Moment& moment) {
    const std::string where = asks_where() ? switches().where() : "";
    const std::lock_guard<std::mutex> lock(mutex_);
    Clock joined = queue->clock;
    join(joined, host_);
    const Clock before = joined;
    join(joined, moment->clock);
    if (joined != before) {
      if (++report_.edges == dropped_edge_) {
        report_.dropped = "wait of stream " + std::to_string(queue->index) + " for stream " +
                          std::to_string(moment->stream) + where;
        return;
      }
      queue->clock = joined;
    }
    if (moment->passed) return;
    push(queue, {"wait", [] {}, {}, [moment] { return moment->passed.load(); }}, "");
  }

  bool has_passed(const Moment& moment) {
    if (!moment->passed) return false;
    const std::lock_guard<std::mutex> lock(mutex_);
    join(host_, moment->clock);
    return true;
  }

  // Before anything is enqueued that the host would wait for.
  static std::string permit_wait(const std::string& why) {
    const std::string where = switches().where ? switches().where() : "";
    TORCH_CHECK(!switches().refuses_waits, "a host wait was refused: ", why, where);
    return where;
  }

  void host_wait(const Moment& moment, const std::string& why) {
    const std::string where = permit_wait(why);
    std::unique_lock<std::mutex> lock(mutex_);
    report_.waits.push_back(why + (where.empty() ? "" : " " + where));
    changed_.wait(lock, [&] { return moment->passed.load(); });
    join(host_, moment->clock);
    lock.unlock();
    check_failure();
  }

  void poke() {
    const std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }

  void synchronize_all() {
    std::vector<Moment> moments;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& streams : streams_) {
        for (Queue* queue : streams) moments.push_back(point(queue));
      }
    }
    for (const Moment& moment : moments) {
      if (!has_passed(moment)) host_wait(moment, "synchronize");
    }
    check_failure();
  }

  // --- Memory ---

  Block* allocate(size_t bytes) {
    Queue* home = current();
    const std::string where = asks_where() ? switches().where() : "";
    const std::lock_guard<std::mutex> lock(mutex_);
    collect();
    const size_t pages = (bytes + kPage - 1) / kPage;
    Block* block = take(home, pages);
    block->asked = (bytes + 511) / 512 * 512;
    block->where = where;
    report_.allocated += block->asked;
    if (report_.allocated > report_.peak) note_peak();
    char* data = block->data;
    const size_t all = block->pages * kPage;
    // Earlier work of its own stream, and earlier uses of it, come before; the stream itself waits
    // for nothing.
    Task fill{"reuse of memory", [=] { std::memset(data, 0xff, all); }, {{data, all, true, true}}};
    push(home, std::move(fill), where, &block->after);
    block->after.clear();
    return block;
  }

  void note_peak() {
    report_.peak = report_.allocated;
    if (!asks_where()) return;
    report_.live.clear();
    for (const auto& [data, block] : blocks_) report_.live.emplace_back(block->asked, block->where);
  }

  void free(Block* block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    report_.allocated -= block->asked;
    if (block->used.empty()) {
      free_[block->home].emplace(block->pages, block);
    } else {
      for (Queue* queue : block->used) block->moments.push_back(point(queue));
      block->used.clear();
      in_use_.push_back(block);
    }
    blocks_.erase(block->data);
  }

  void use_on(Block* block, Queue* queue) {
    const std::string where = asks_where() ? switches().where() : "";
    const std::lock_guard<std::mutex> lock(mutex_);
    if (queue == block->home || block->used.count(queue) != 0) return;
    if (++report_.records == dropped_record_) {
      report_.dropped = "record_stream of stream " + std::to_string(queue->index) + where;
      return;
    }
    block->used.insert(queue);
  }

  void drop(size_t edge, size_t record) {
    const std::lock_guard<std::mutex> lock(mutex_);
    dropped_edge_ = edge;
    dropped_record_ = record;
  }

  void* allocate_pinned(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = pinned_.begin(); it != pinned_.end();) {
      const bool idle = it->second.freed && all_passed(it->second.moments);
      if (idle) std::free(const_cast<char*>(it->first));
      it = idle ? pinned_.erase(it) : std::next(it);
    }
    auto* data = static_cast<char*>(std::aligned_alloc(kPage, (bytes / kPage + 1) * kPage));
    pinned_[data] = {bytes, {}};
    return data;
  }

  PinnedBlock* find_pinned(const void* data) {
    auto it = pinned_.upper_bound(static_cast<const char*>(data));
    if (it == pinned_.begin()) return nullptr;
    --it;
    const auto* at = static_cast<const char*>(data);
    return at < it->first + std::max<size_t>(it->second.bytes, 1) ? &it->second : nullptr;
  }

  template <class Use>
  bool with_pinned(const void* data, const Use& use) {
    const std::lock_guard<std::mutex> lock(mutex_);
    PinnedBlock* block = find_pinned(data);
    if (block != nullptr) use(*block);
    return block != nullptr;
  }

  // --- Reports ---

  void detect() {
    synchronize_all();
    const std::lock_guard<std::mutex> lock(mutex_);
    detector_.start();
  }

  void stop_detecting() {
    synchronize_all();
    const std::lock_guard<std::mutex> lock(mutex_);
    detector_.stop();
    names_.clear();
  }

  void name(const void* begin, size_t bytes, std::string name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto* from = static_cast<const char*>(begin);
    for (auto it = names_.lower_bound(from); it != names_.end() && it->first < from + bytes;) {
      it = names_.erase(it);
    }
    names_[from] = {bytes, std::move(name)};
  }

  Report report(bool reset) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Report copy = report_;
    if (reset) {
      report_ = {};
      report_.allocated = report_.peak = copy.allocated;
      seen_.clear();
    }
    return copy;
  }

  void check_failure() {
    if (!failed_) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(false, "a task of the simulated device failed: ", failure_);
  }

  void seed(uint64_t seed) {
    const std::lock_guard<std::mutex> lock(mutex_);
    random_.seed(seed);
  }

  Queue* current(c10::DeviceIndex device = -1) {
    device = device < 0 ? current_device : device;
    Queue*& queue = current_queue[device];
    if (queue == nullptr) queue = queue_of(default_stream(device));
    return queue;
  }

  std::vector<Range> run_kernel(const Kernel& kernel) {
    return kernel(arena_, detector_.on() ? kArena : 0);
  }

  void count_kernel() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++report_.kernels;
  }

 private:
  Runtime()
      : arena_(static_cast<char*>(mmap(nullptr, kArena, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))),
        detector_(arena_) {
    TORCH_CHECK(arena_ != MAP_FAILED, "no addresses for the simulated device's memory");
    streams_.resize(kDevices);
    for (int device = 0; device < kDevices; ++device) {
      add_stream(static_cast<c10::DeviceIndex>(device));
    }
  }

  bool asks_where() const { return detector_.on() && switches().where; }

  void add_stream(c10::DeviceIndex device) {
    auto& streams = streams_[static_cast<size_t>(device)];
    streams.push_back(new Queue(++made_, device, static_cast<c10::StreamId>(streams.size())));
  }

  void push(Queue* queue, Task task, const std::string& where, const Clock* after = nullptr) {
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
    join(queue->clock, host_);
    if (queue->clock.size() <= queue->index) queue->clock.resize(queue->index + 1);
    ++queue->clock[queue->index];
    Clock clock = queue->clock;
    if (after != nullptr) join(clock, *after);
    auto origin = std::make_shared<const Origin>(Origin{task.name, where, queue->index});
    queue->tasks.push_back({std::move(task), std::move(clock), std::move(origin), ++pushed_});
    changed_.notify_all();
  }

  Moment point(Queue* queue) {
    auto moment = std::make_shared<Point>();
    moment->clock = queue->clock;
    moment->stream = queue->index;
    join(moment->clock, host_);
    const auto pass = [moment] {
      moment->time = std::chrono::steady_clock::now();
      moment->passed = true;
    };
    if (queue->tasks.empty() && !queue->busy) {
      pass();
    } else {
      push(queue, {"event", pass}, "");
    }
    return moment;
  }

  void work() {
    runs_tasks = true;
    at::set_num_threads(1);  // faults are those of this thread
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      bool waits = false;
      Queue* queue = choose(waits);
      if (queue == nullptr) {
        // A collective that waits for other ranks does not announce its end.
        changed_.wait_for(lock, std::chrono::microseconds(waits ? 200 : 100000));
        continue;
      }
      const Pending next = std::move(queue->tasks.front());
      queue->tasks.pop_front();
      queue->busy = true;
      const auto pause = pause_before(next);
      lock.unlock();
      if (pause.count() > 0) std::this_thread::sleep_for(pause);
      run(next);
      lock.lock();
      queue->busy = false;
      changed_.notify_all();
    }
  }

  // One of the streams whose next task is ready.
  Queue* choose(bool& waits) {
    if (switches().lag > 0 && random_() % 16 == 0) {
      for (const auto& streams : streams_) {
        for (Queue* queue : streams) queue->eager = std::array{1.0, 0.1, 0.001}[random_() % 3];
      }
    }
    Queue* chosen = nullptr;
    double sum = 0;
    for (const auto& streams : streams_) {
      for (Queue* queue : streams) {
        if (queue->tasks.empty()) continue;
        const Pending& head = queue->tasks.front();
        if (head.task.ready && !head.task.ready()) {
          waits = true;
          continue;
        }
        if (switches().lag <= 0) {
          if (!chosen || head.order < chosen->tasks.front().order) chosen = queue;
          continue;
        }
        sum += queue->eager;
        if (std::uniform_real_distribution<>(0, sum)(random_) < queue->eager) chosen = queue;
      }
    }
    return chosen;
  }

  std::chrono::microseconds pause_before(const Pending&) {
    const double lag = switches().lag;
    if (lag <= 0 || random_() % 64 != 0) return {};
    return std::chrono::microseconds(
        static_cast<int64_t>(lag * static_cast<double>(random_() % 1000)));
  }

  void run(const Pending& next) {
    const bool watched = detector_.on();
    if (watched) detector_.before(next.task);
    try {
      next.task.run();
    } catch (const std::exception& error) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!failed_) failure_ = next.task.name + ": " + error.what();
      failed_ = true;
    }
    if (!watched) return;
    detector_.after(next, [&](const char* at, const Access& one, const Access& other) {
      const std::lock_guard<std::mutex> lock(mutex_);
      note_race(at, one, other);
    });
  }

  void note_race(const char* at, const Access& one, const Access& other) {
    const auto side = [](const Access& access) {
      return (access.written ? "written by " : "read by ") + access.origin->name + " on stream " +
             std::to_string(access.origin->stream) + access.origin->where;
    };
    const std::string text = "race on " + name_of(at) + ": " + side(one) + "; " + side(other);
    if (seen_
            .insert(one.origin->name + one.origin->where + "|" + other.origin->name +
                    other.origin->where)
            .second) {
      report_.races.push_back(text);
    }
  }

  std::string name_of(const char* at) {
    std::string found;
    auto named = names_.upper_bound(at);
    if (named != names_.begin() && at < (--named)->first + named->second.first) {
      found = named->second.second;
    }
    auto block = blocks_.upper_bound(at);
    if (block != blocks_.begin() && at < (--block)->first + block->second->pages * kPage) {
      const std::string of = std::to_string(at - block->first) + " of " +
                             std::to_string(block->second->asked) + " bytes allocated" +
                             block->second->where;
      return found.empty() ? "byte " + of : found + " (byte " + of + ")";
    }
    return found.empty() ? "memory that has been freed" : found + " (freed)";
  }

  // --- Blocks ---

  static bool all_passed(const std::vector<Moment>& moments) {
    return std::all_of(moments.begin(), moments.end(),
                       [](const Moment& moment) { return moment->passed.load(); });
  }

  // Frees blocks that other streams have used and are past.
  void collect() {
    for (size_t i = 0; i < in_use_.size();) {
      Block* block = in_use_[i];
      if (!all_passed(block->moments)) {
        ++i;
        continue;
      }
      for (const Moment& moment : block->moments) join(block->after, moment->clock);
      block->moments.clear();
      free_[block->home].emplace(block->pages, block);
      in_use_.erase(in_use_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }

  Block* take(Queue* home, size_t pages) {
    auto& free = free_[home];
    // The block freed last, of those that are not much too large: so that a wrong use of it soon
    // shows.
    auto it = free.upper_bound(pages + pages / 4);
    Block* block;
    if (it != free.begin() && (--it)->first >= pages) {
      block = it->second;
      free.erase(it);
    } else {
      TORCH_CHECK_WITH(OutOfMemoryError, (next_page_ + pages) * kPage <= kArena,
                       "the simulated device is out of memory");
      block = new Block{arena_ + next_page_ * kPage, pages, 0, home};
      next_page_ += pages + 1;  // an access past a block's end touches no other page
    }
    blocks_[block->data] = block;
    return block;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_;
  std::vector<std::vector<Queue*>> streams_;  // by device; the first is the default
  std::map<c10::DeviceIndex, size_t> handed_out_;
  size_t made_ = 0;
  uint64_t pushed_ = 0;
  Clock host_;
  std::mt19937_64 random_{0};

  char* const arena_;
  size_t next_page_ = 0;
  std::map<Queue*, std::multimap<size_t, Block*>> free_;
  std::vector<Block*> in_use_;
  std::map<const char*, Block*> blocks_;
  std::map<const char*, PinnedBlock> pinned_;
  std::map<const char*, std::pair<size_t, std::string>> names_;

  Detector detector_;
  Report report_;
  std::set<std::string> seen_;
  size_t dropped_edge_ = 0, dropped_record_ = 0;
  std::atomic<bool> failed_{false};
  std::string failure_;
};

Runtime& the() { return Runtime::the(); }

void free_block(void* block) { the().free(static_cast<Block*>(block)); }
void free_pinned(void* data) {
  the().with_pinned(data, [](PinnedBlock& block) { block.freed = true; });
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kDevice, current_device);
    if (bytes == 0) return {nullptr, nullptr, &free_block, device};
    Block* block = the().allocate(bytes);
    return {block->data, block, &free_block, device};
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "the host cannot copy memory of the simulated device");
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = the().allocate_pinned(bytes);
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

Moment& moment_of(void* event) { return *static_cast<Moment*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device former = getDevice();
    setDevice(device);
    return former;
  }
  c10::Device getDevice() const override { return {kDevice, current_device}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return the().stream_of(the().current(device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return the().default_stream(device.index() < 0 ? current_device : device.index());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return the().new_stream(device.index() < 0 ? current_device : device.index());
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStreamFromGlobalPool(device, false);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream former = getStream(stream.device());
    current_queue[stream.device_index()] = the().queue_of(stream);
    return former;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return static_cast<CUstream_st*>(the().queue_of(stream));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Moment*>(event);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (*event == nullptr) *event = new Moment;
    moment_of(*event) = simulated::record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) simulated::wait(stream, moment_of(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || has_passed(moment_of(event));
  }
  void synchronizeEvent(void* event) const override {
    // CUDA does not wait for what has passed either.
    if (!queryEvent(event)) host_wait(moment_of(event), "event.synchronize");
  }
  bool queryStream(const c10::Stream& stream) const override {
    return has_passed(simulated::record(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_wait(simulated::record(stream), "stream.synchronize");
  }
  void synchronizeDevice(c10::DeviceIndex) const override { the().synchronize_all(); }
  double elapsedTime(void* one, void* other, c10::DeviceIndex) const override {
    const auto between = moment_of(other)->time - moment_of(one)->time;
    return std::chrono::duration<double, std::milli>(between).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    use_on(data, stream);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned;

}  // namespace

void Queue::launch(const char* name, Kernel run) {
  the().count_kernel();
  const auto found = std::make_shared<std::vector<Range>>();
  const auto note = [found, run = std::move(run)] { *found = the().run_kernel(run); };
  the().enqueue(this, {name, note, {}, nullptr, found});
}

c10::Stream current_stream(c10::DeviceIndex device) {
  return the().stream_of(the().current(device));
}
c10::Stream new_stream(c10::DeviceIndex device) { return the().new_stream(device); }
void enqueue(c10::Stream stream, Task task) {
  the().enqueue(the().queue_of(stream), std::move(task));
}
Moment record(c10::Stream stream) { return the().record(the().queue_of(stream)); }
void wait(c10::Stream stream, const Moment& moment) { the().wait(the().queue_of(stream), moment); }
bool has_passed(const Moment& moment) { return the().has_passed(moment); }
void host_wait(const Moment& moment, const std::string& why) { the().host_wait(moment, why); }
void run_and_wait(c10::Stream stream, Task task) {
  const std::string why = task.name;
  Runtime::permit_wait(why);
  enqueue(stream, std::move(task));
  host_wait(record(stream), why);
}
void poke() { the().poke(); }
c10::Allocator* pinned_allocator() { return &pinned; }
bool is_pinned(const void* data) {
  return the().with_pinned(data, [](PinnedBlock&) {});
}
void use_pinned(const void* data, const Moment& moment) {
  the().with_pinned(data, [&](PinnedBlock& block) { block.moments.push_back(moment); });
}
void use_on(const c10::DataPtr& data, c10::Stream stream) {
  if (data.get_deleter() != &free_block || data.get() == nullptr) return;
  the().use_on(static_cast<Block*>(data.get_context()), the().queue_of(stream));
}
Switches& switches() {
  static auto* all = new Switches;
  return *all;
}
void seed(uint64_t seed) { the().seed(seed); }
void start_detecting() { the().detect(); }
void drop(size_t edge, size_t record) { the().drop(edge, record); }
void stop_detecting() { the().stop_detecting(); }
void name_memory(const void* begin, size_t bytes, std::string name) {
  the().name(begin, bytes, std::move(name));
}
void synchronize_all() { the().synchronize_all(); }
Report report(bool reset) { return the().report(reset); }
void check_failure() { the().check_failure(); }

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
REGISTER_ALLOCATOR(kDevice, &device_allocator);

}  // namespace simulated
