#include "collective.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <functional>
#include <future>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "../check.h"
#include "../ops/buffers.h"
#include "../ops/ops.h"
#include "worker.h"

namespace fastsync::comm {
namespace {

using Clock = std::chrono::steady_clock;

// [Note: no Python object in a work handle]
// torch stashes the caller's Python context in thread-local state for each backward, and Gloo's
// work handle copies that state. Its thread drops the handle while it holds the queue's lock, and
// would first have to take the GIL from a Python program that is busy, or exiting: the latter
// aborts the process. Nothing in a collective needs the context.
class WithoutPythonObjects {
 public:
  WithoutPythonObjects() : saved_(at::impl::ThreadLocalPythonObjects::get_state()) {
    at::impl::ThreadLocalPythonObjects::set_state({});
  }
  ~WithoutPythonObjects() { at::impl::ThreadLocalPythonObjects::set_state(std::move(saved_)); }
  WithoutPythonObjects(const WithoutPythonObjects&) = delete;
  WithoutPythonObjects& operator=(const WithoutPythonObjects&) = delete;

 private:
  at::impl::ThreadLocalPythonObjects saved_;
};

// How the host learns that a collective has ended: by its future, which on a device may complete
// when it has been enqueued, or by asking the device, for so long at most.
struct Tidings {
  bool by_future = true;
  std::optional<std::chrono::milliseconds> timeout;
};

// [Note: waiting for a device]
// NCCL's work asks an event whether the collective has ended on the device: there is no notice, so
// a waiting thread asks again and again. An error is thrown as it is found. The work's own wait()
// would first end the communicator's kernels, and those tell their neighbours that data has come
// which has not (see [Note: when a communicator is aborted]).
class WorkInFlight final : public CalledByWait<> {
 public:
  WorkInFlight(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> buffers,
               Tidings tidings)
      : buffers_(std::move(buffers)), work_(std::move(work)), tidings_(tidings) {}

  at::Tensor wait() override {
    work_->wait();
    call();
    return {};
  }

  void on_done(std::function<void()> fn) override {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    try {
      future = work_->getFuture();
    } catch (const c10::Error&) {
      // Backends need not have futures.
    }
    if (future) {
      future->addCallback([fn = std::move(fn)](c10::ivalue::Future&) { fn(); });
    } else {
      CalledByWait::on_done(std::move(fn));
    }
  }

  bool is_done_within(std::chrono::milliseconds time) override {
    if (tidings_.timeout) return ends_within(time);
    if (work_->isCompleted()) return true;
    if (time.count() == 0 || !can_be_asked()) return false;
    if (!completed_.valid()) watch();
    return completed_.wait_for(time) == std::future_status::ready;
  }

  bool can_be_asked() const override { return tidings_.by_future || tidings_.timeout; }

 private:
  bool ends_within(std::chrono::milliseconds time) {
    constexpr std::chrono::microseconds kPause{50};
    const auto asked = Clock::now();
    while (!work_->isCompleted()) {
      FS_CHECK(Clock::now() - started_ < *tidings_.timeout, "timed out after ",
               tidings_.timeout->count(), " ms");
      if (Clock::now() - asked >= time) return false;
      std::this_thread::sleep_for(kPause);
    }
    if (const std::exception_ptr error = work_->exception()) std::rethrow_exception(error);
    return true;
  }

  // Backends without futures tell the end by wait() alone.
  void watch() {
    const auto completion = std::make_shared<std::promise<void>>();
    completed_ = completion->get_future();
    try {
      work_->getFuture()->addCallback(
          [completion](c10::ivalue::Future&) { completion->set_value(); });
    } catch (const c10::Error&) {
      completion->set_value();
    }
  }

  std::vector<at::Tensor> buffers_;
  c10::intrusive_ptr<c10d::Work> work_;
  const Tidings tidings_;
  const Clock::time_point started_ = Clock::now();
  std::future<void> completed_;  // invalid: not asked for
};

class Exchange;

// Exchanges of this process that are still referenced. Never destroyed: the thread of a hanging one
// runs longer than main().
class UnderWay {
 public:
  static UnderWay& of_process() {
    static UnderWay* const under_way = new UnderWay;
    return *under_way;
  }
  void add(Exchange* exchange) {
    const std::lock_guard<std::mutex> lock(mutex_);
    exchanges_.insert(exchange);
  }
  void remove(Exchange* exchange) {
    const std::lock_guard<std::mutex> lock(mutex_);
    exchanges_.erase(exchange);
  }
  void abort();

 private:
  std::mutex mutex_;
  std::set<Exchange*> exchanges_;
};

// [Note: announce first]
// Gloo sends once the receiver has announced that it is ready, and what a rank writes to another
// leaves in order. If both of two ranks first sent, the announcement of the later one would stand
// behind all its data: the two directions would take turns. Gloo's own collectives do that, and
// ranks hardly ever start at the same moment. So a rank posts all receives before its first send.
class Exchange {
 public:
  // Messages of the ranks after this one come first, so that all ranks are busy.
  Exchange(c10::intrusive_ptr<c10d::Backend> backend, std::vector<Message> received,
           std::vector<Message> sent, int tag)
      : backend_(std::move(backend)),
        received_(std::move(received)),
        sent_(std::move(sent)),
        tag_(tag) {
    const int ranks = backend_->getSize();
    const int self = backend_->getRank();
    const auto by_distance = [](std::vector<Message>& messages, const auto& distance) {
      std::stable_sort(messages.begin(), messages.end(), [&](const Message& a, const Message& b) {
        return distance(a.rank) < distance(b.rank);
      });
    };
    by_distance(received_, [=](int rank) { return (self + ranks - rank) % ranks; });
    by_distance(sent_, [=](int rank) { return (rank + ranks - self) % ranks; });
    UnderWay::of_process().add(this);
  }
  ~Exchange() { UnderWay::of_process().remove(this); }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Blocks while sockets take bytes. The group's functions would go through torch's dispatcher, for
  // each message.
  void start() {
    for (const Message& message : received_) {
      std::vector<at::Tensor> part{message.tensor};
      keep(backend_->recv(part, message.rank, tag_));
    }
    for (const Message& message : sent_) {
      std::vector<at::Tensor> part{message.tensor};
      keep(backend_->send(part, message.rank, tag_));
    }
  }

  void wait() {
    for (const auto& work : works_) work->wait();
  }

  // Ends all waits.
  void abort() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& work : works_) work->abort();
  }

 private:
  void keep(c10::intrusive_ptr<c10d::Work> work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    works_.push_back(std::move(work));
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::vector<Message> received_;
  std::vector<Message> sent_;
  int tag_;
  std::mutex mutex_;  // of what follows, until all have started
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

void UnderWay::abort() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Exchange* const exchange : exchanges_) exchange->abort();
}

// Threads on which exchanges are started and, where the caller asks without waiting, waited for.
class ExchangeThreads {
 public:
  Worker& starter() { return starter_; }
  Worker& waiter() {
    std::call_once(waits_, [this] { waiter_ = std::make_unique<Worker>(); });
    return *waiter_;
  }

 private:
  Worker starter_;
  std::once_flag waits_;
  std::unique_ptr<Worker> waiter_;
};

class ExchangeInFlight final : public InFlight {
 public:
  ExchangeInFlight(std::shared_ptr<Exchange> exchange, std::shared_ptr<ExchangeThreads> threads)
      : exchange_(std::move(exchange)), threads_(std::move(threads)) {
    started_ = threads_->starter().submit([exchange = exchange_] {
      exchange->start();
      return false;
    });
  }

  // An exchange without a waiter must still receive its messages, or the next one would.
  ~ExchangeInFlight() override {
    if (!waited_) watch();
  }
  ExchangeInFlight(const ExchangeInFlight&) = delete;
  ExchangeInFlight& operator=(const ExchangeInFlight&) = delete;

  at::Tensor wait() override {
    waited_ = true;
    if (watched_) {
      watched_->wait();
    } else {
      started_->wait();
      exchange_->wait();
    }
    return {};
  }

  void on_done(std::function<void()> fn) override {
    watch();
    watched_->on_done(std::move(fn));
  }

  // Messages cannot be queried. Another thread waits for them, once the caller wants to know.
  bool is_done_within(std::chrono::milliseconds time) override {
    watch();
    return watched_->is_done_within(time);
  }

  bool can_be_asked() const override { return true; }

 private:
  void watch() {
    if (watched_) return;
    watched_ = threads_->waiter().submit([exchange = exchange_, started = started_] {
      started->wait();
      exchange->wait();
      return false;
    });
  }

  std::shared_ptr<Exchange> exchange_;
  std::shared_ptr<ExchangeThreads> threads_;
  std::shared_ptr<Ticket> started_;
  std::shared_ptr<Ticket> watched_;
  bool waited_ = false;
};

// Data that arrives in equal parts. Both buffers are of `pool`, and go back there.
class Received final : public Incoming {
 public:
  Received(std::unique_ptr<InFlight> arriving, at::Tensor received, at::Tensor sent, int64_t parts,
           std::shared_ptr<ops::BufferPool> pool)
      : arriving_(std::move(arriving)),
        received_(std::move(received)),
        sent_(std::move(sent)),
        pool_(std::move(pool)) {
    const int64_t each = received_.numel() / parts;
    for (int64_t i = 0; i < parts; ++i) parts_.push_back(ops::run_of(received_, i * each, each));
  }
  ~Received() override { end(/*in_flight=*/true); }
  Received(const Received&) = delete;
  Received& operator=(const Received&) = delete;

  at::Tensor wait() override { return arriving_->wait(); }
  void on_done(std::function<void()> fn) override { arriving_->on_done(std::move(fn)); }
  bool is_done_within(std::chrono::milliseconds time) override {
    return arriving_->is_done_within(time);
  }
  bool can_be_asked() const override { return arriving_->can_be_asked(); }

  const std::vector<at::Tensor>& parts() const override { return parts_; }
  void release() override {
    parts_.clear();
    end(/*in_flight=*/false);
  }

 private:
  void end(bool in_flight) {
    pool_->end(std::exchange(received_, at::Tensor()), in_flight);
    pool_->end(std::exchange(sent_, at::Tensor()), in_flight);
  }

  std::unique_ptr<InFlight> arriving_;
  at::Tensor received_;
  at::Tensor sent_;
  std::shared_ptr<ops::BufferPool> pool_;
  std::vector<at::Tensor> parts_;
};

using GatherRows =
    std::function<std::unique_ptr<InFlight>(const at::Tensor& gathered, const at::Tensor& mine)>;

constexpr int64_t kDense = -1;  // in place of a number of rows

// Sums sparse gradients by an all-gather of their rows. `rows`: coalesced; undefined if this rank
// has a dense tensor. wait() returns the sum. It calls `dense`, on all ranks, if the tensor of any
// rank is dense. `gather`: an all-gather over so many ranks.
//
// [Note: sparse sums over Gloo]
// Gloo's threads note the name of the work that they have completed in one string of their process
// group, and take no lock. "_ALLREDUCE_SPARSE" is the only name that does not fit into the string
// itself: a thread that completes another work at the same moment then writes to memory that the
// first has freed. So the rows are gathered and summed here: first their numbers, and, when the sum
// is asked for, the rows, padded to the largest number.
//
// The numbers also say which ranks have a dense tensor instead, as where one rank alone ties an
// embedding to a linear layer. Then all ranks send a dense one.
class RowsInFlight final : public CalledByWait<> {
 public:
  RowsInFlight(const at::Tensor& rows, SendDense dense, int64_t ranks, GatherRows gather)
      : rows_(rows),
        dense_(std::move(dense)),
        counts_(ops::make_scratch({ranks}, at::kLong, at::kCPU)),
        gather_(std::move(gather)) {
    const at::Tensor count = ops::make_zeros({1}, at::kLong, at::kCPU);
    *count.mutable_data_ptr<int64_t>() = rows.defined() ? rows.indices().size(1) : kDense;
    counting_ = gather_(counts_, count);
  }

  at::Tensor wait() override {
    const at::NoGradGuard no_grad;
    counting_->wait();
    const int64_t* counts = counts_.const_data_ptr<int64_t>();
    const bool any_dense =
        std::find(counts, counts + counts_.numel(), kDense) != counts + counts_.numel();
    const at::Tensor sum = any_dense ? dense_()->wait() : sum_of_rows(counts);
    call();
    return sum;
  }

 private:
  at::Tensor sum_of_rows(const int64_t* counts) const {
    const int64_t most = *std::max_element(counts, counts + counts_.numel());
    if (most == 0) return rows_;
    const at::Tensor positions = everyones(rows_.indices().t(), counts, most).t();
    const at::Tensor values = everyones(rows_.values(), counts, most);
    return at::_sparse_coo_tensor_unsafe(positions, values, rows_.sizes()).coalesce();
  }

  // Along the first dimension, rank by rank.
  at::Tensor everyones(const at::Tensor& mine, const int64_t* counts, int64_t most) const {
    std::vector<int64_t> sizes = mine.sizes().vec();
    sizes.front() = most;
    const at::Tensor padded = ops::make_zeros(sizes, mine.scalar_type(), mine.device());
    padded.narrow(0, 0, mine.size(0)).copy_(mine);
    sizes.front() = most * counts_.numel();
    const at::Tensor gathered = ops::make_scratch(sizes, mine.scalar_type(), mine.device());
    gather_(gathered, padded)->wait();
    std::vector<at::Tensor> parts;
    for (int64_t r = 0; r < counts_.numel(); ++r) {
      parts.push_back(gathered.narrow(0, r * most, counts[r]));
    }
    return at::cat(parts);
  }

  at::Tensor rows_;
  SendDense dense_;
  at::Tensor counts_;
  GatherRows gather_;
  std::unique_ptr<InFlight> counting_;
};

// torch 2.13 gave these collectives other names and deprecated the old ones. Overloads with `int`
// are better for the argument 0, where the group has the function that their result is declared by.
using Splits = std::vector<int64_t>;

template <typename Group>
auto all_to_all_on(Group& group, at::Tensor& out, at::Tensor& in, Splits& splits, int /*newer*/)
    -> decltype(group.all_to_all_single(out, in, splits, splits)) {
  return group.all_to_all_single(out, in, splits, splits);
}

template <typename Group>
auto all_to_all_on(Group& group, at::Tensor& out, at::Tensor& in, Splits& splits,
                   int64_t /*older*/) {
  return group.alltoall_base(out, in, splits, splits);
}

template <typename Group>
auto all_gather_on(Group& group, at::Tensor& out, at::Tensor& in, int /*newer*/)
    -> decltype(group.all_gather_single(out, in)) {
  return group.all_gather_single(out, in);
}

template <typename Group>
auto all_gather_on(Group& group, at::Tensor& out, at::Tensor& in, int64_t /*older*/) {
  return group._allgather_base(out, in);
}

template <typename Group>
auto reduce_scatter_on(Group& group, at::Tensor& out, at::Tensor& in, int /*newer*/)
    -> decltype(group.reduce_scatter_single(out, in)) {
  return group.reduce_scatter_single(out, in);
}

template <typename Group>
auto reduce_scatter_on(Group& group, at::Tensor& out, at::Tensor& in, int64_t /*older*/) {
  return group._reduce_scatter_base(out, in);
}

Communicator communicator_in(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                             at::Device device) {
  const c10::weak_intrusive_ptr<c10d::ProcessGroup> weak(group);
  Communicator made;
  made.abort = [weak, device] {
    const auto held = weak.lock();
    if (!held) return;
    try {
      held->getBackend(device.type())->abort();
    } catch (const std::exception&) {
      // Its kernels spin on: a script that waits for them is ended.
    }
  };
  made.timeout = [weak, device] {
    const auto held = weak.lock();
    if (!held) return 0.0;
    try {
      const auto options = held->getBackend(device.type())->getBackendOptions();
      return std::chrono::duration<double>(options->timeout).count();
    } catch (const std::exception&) {
      return 0.0;
    }
  };
  return made;
}

class ProcessGroupCollective final : public Collective {
 public:
  // Asked once: a group that is written in Python takes the GIL to answer, and the reducer asks for
  // each gradient.
  explicit ProcessGroupCollective(c10::intrusive_ptr<c10d::ProcessGroup> group)
      : group_(std::move(group)), rank_(group_->getRank()), size_(group_->getSize()) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void let_host_wait(std::chrono::milliseconds timeout) override { timeout_ = timeout; }

  Communicator communicator(at::Device device) const override {
    return communicator_in(group_, device);
  }

  std::unique_ptr<InFlight> all_reduce(const at::Tensor& flat) override {
    std::vector<at::Tensor> buffers{flat};
    return start(
        *group_, "all-reduce", {flat}, [&] { return group_->allreduce(buffers); }, timeout_);
  }

  // See [Note: sparse sums over Gloo]. The group's own collectives, which keep the order of several
  // models' buckets.
  std::unique_ptr<InFlight> all_reduce_rows(const at::Tensor& rows, SendDense dense,
                                            at::Device device) override {
    if (!has_messages(device)) {
      return Collective::all_reduce_rows(rows, std::move(dense), device);
    }
    return std::make_unique<RowsInFlight>(
        rows, std::move(dense), size(),
        [group = group_](const at::Tensor& gathered, const at::Tensor& mine) {
          return gather_by_backend(*group, gathered, mine);
        });
  }

  std::unique_ptr<InFlight> all_to_all(const at::Tensor& received,
                                       const at::Tensor& sent) override {
    if (on_gloo(received)) {
      return exchange_parts(equal_parts(received), equal_parts(sent));
    }
    at::Tensor out = received;
    at::Tensor in = sent;
    Splits equal;
    return start(*group_, "all-to-all", {out, in},
                 [&] { return all_to_all_on(*group_, out, in, equal, 0); });
  }

  std::shared_ptr<Incoming> all_to_others(const at::Tensor& sent,
                                          const std::shared_ptr<ops::BufferPool>& pool) override {
    const at::Tensor received = pool->take(sent.numel(), sent.scalar_type(), sent.device());
    try {
      return std::make_shared<Received>(send_to_others(received, sent), received, sent, size() - 1,
                                        pool);
    } catch (...) {
      pool->forget(received);
      throw;
    }
  }

  std::unique_ptr<InFlight> all_gather(const at::Tensor& gathered,
                                       const at::Tensor& mine) override {
    if (on_gloo(gathered)) {
      return exchange_parts(equal_parts(gathered),
                            std::vector<at::Tensor>(static_cast<size_t>(size()), mine), kGatherTag);
    }
    return gather_by_backend(*group_, gathered, mine);
  }

  std::unique_ptr<InFlight> reduce_scatter(const at::Tensor& mine, const at::Tensor& all) override {
    at::Tensor out = mine;
    at::Tensor in = all;
    return start(*group_, "reduce-scatter", {out, in},
                 [&] { return reduce_scatter_on(*group_, out, in, 0); });
  }

  bool has_messages(at::Device device) const override {
    if (!device.is_cpu()) return false;
    const std::string name = group_->getBackend(at::kCPU)->getBackendName();
    return name == "gloo" || name == "fastsync_mpi";
  }

  std::unique_ptr<InFlight> exchange(std::vector<Message> received, std::vector<Message> sent,
                                     int tag) override {
    if (!threads_) threads_ = std::make_shared<ExchangeThreads>();
    return std::make_unique<ExchangeInFlight>(
        std::make_shared<Exchange>(group_->getBackend(at::kCPU), std::move(received),
                                   std::move(sent), tag),
        threads_);
  }

 private:
  static constexpr int kTag = 0x66617374;  // a program's own messages have small ones
  // A rank that gathers while another one exchanges waits, and is named. Under one tag Gloo would
  // end the process where their sizes differ, and else take the ones for the others.
  static constexpr int kGatherTag = kTag + 1;

  bool on_gloo(const at::Tensor& tensor) const { return has_messages(tensor.device()); }

  static std::unique_ptr<InFlight> gather_by_backend(c10d::ProcessGroup& group,
                                                     const at::Tensor& gathered,
                                                     const at::Tensor& mine) {
    at::Tensor out = gathered;
    at::Tensor in = mine;
    return start(group, "all-gather", {out, in}, [&] { return all_gather_on(group, out, in, 0); });
  }

  std::unique_ptr<InFlight> send_to_others(const at::Tensor& received, const at::Tensor& sent) {
    const int64_t each = received.numel() / (size() - 1);
    if (on_gloo(received)) return exchange_parts(with_gap(received, each), with_gap(sent, each));
    at::Tensor out = received;
    at::Tensor in = sent;
    Splits splits(static_cast<size_t>(size()), each);
    splits[static_cast<size_t>(rank())] = 0;
    return start(*group_, "all-to-all", {out, in},
                 [&] { return all_to_all_on(*group_, out, in, splits, 0); });
  }

  std::vector<at::Tensor> equal_parts(const at::Tensor& flat) const {
    const int64_t each = flat.numel() / size();
    std::vector<at::Tensor> parts;
    for (int64_t r = 0; r < size(); ++r) parts.push_back(ops::run_of(flat, r * each, each));
    return parts;
  }

  // Parts of `each` elements by rank, of which this rank's has none.
  std::vector<at::Tensor> with_gap(const at::Tensor& flat, int64_t each) const {
    std::vector<at::Tensor> parts;
    for (int64_t r = 0, begin = 0; r < size(); ++r) {
      const int64_t numel = r == rank() ? 0 : each;
      parts.push_back(ops::run_of(flat, begin, numel));
      begin += numel;
    }
    return parts;
  }

  // See [Note: announce first]. Gloo's all-gather moreover receives into a temporary
  // of its own and copies that.
  std::unique_ptr<InFlight> exchange_parts(std::vector<at::Tensor> parts,
                                           std::vector<at::Tensor> sent, int tag = kTag) {
    const at::NoGradGuard no_grad;
    const auto self = static_cast<size_t>(rank());
    const at::Tensor& own = sent[self];
    if (parts[self].const_data_ptr() != own.const_data_ptr()) {
      parts[self].copy_(ops::run_of(own, 0, own.numel()));
    }
    std::vector<Message> from;
    std::vector<Message> to;
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      from.push_back({r, parts[static_cast<size_t>(r)]});
      to.push_back({r, std::move(sent[static_cast<size_t>(r)])});
    }
    return exchange(std::move(from), std::move(to), tag);
  }

  // Gloo's threads wait for the other ranks on the host, whichever device a tensor is on. A group
  // of another kind than c10d's own may have no backend to ask for.
  static bool waits_on_host(c10d::ProcessGroup& group, at::Device device) {
    if (device.is_cpu()) return true;
    const auto served = group.getDeviceTypes();
    const bool has_backend = std::any_of(served.begin(), served.end(), [&](at::Device other) {
      return other.type() == device.type();
    });
    return has_backend && group.getBackend(device.type())->getBackendName() == "gloo";
  }

  template <typename Issue>
  static std::unique_ptr<InFlight> start(c10d::ProcessGroup& group, const char* what,
                                         std::vector<at::Tensor> buffers, const Issue& issue,
                                         std::optional<std::chrono::milliseconds> timeout = {}) {
    const WithoutPythonObjects guard;  // see [Note: no Python object in a work handle]
    Tidings tidings{waits_on_host(group, buffers.front().device()), timeout};
    if (tidings.by_future) tidings.timeout.reset();
    auto work = issue();
    FS_CHECK(work, "the process group returned no work handle for an ", what);
    return std::make_unique<WorkInFlight>(std::move(work), std::move(buffers), tidings);
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  int rank_;
  int size_;
  std::shared_ptr<ExchangeThreads> threads_;
  std::optional<std::chrono::milliseconds> timeout_;  // of the host, which waits for devices
};

}  // namespace

std::unique_ptr<InFlight> Collective::all_reduce_and_square(const at::Tensor& flat,
                                                            const at::Tensor& /*squares*/,
                                                            int64_t /*squared*/) {
  FS_ASSERT(false, "nobody sums squares up here");
  return all_reduce(flat);
}

at::Tensor Collective::make_flat(int64_t numel, at::ScalarType dtype, at::Device device) {
  return ops::make_flat(numel, dtype, device);
}

std::unique_ptr<Collective> Collective::resolve(const std::string& group_name) {
  return std::make_unique<ProcessGroupCollective>(c10d::resolve_process_group(group_name));
}

Communicator communicator_of(const std::string& group_name, at::Device device) {
  return communicator_in(c10d::resolve_process_group(group_name), device);
}

void leave_pipelines(std::chrono::milliseconds timeout) {
  Worker::leave_all(timeout, [] { UnderWay::of_process().abort(); });
}

void probe_links(Collective& group, at::Device device, LinkKinds kinds) {
  const auto probe = [](const char* what, const auto& start) {
    try {
      start()->wait();
    } catch (const std::exception& error) {
      throw std::runtime_error(concat(what, ": ", error.what()));
    }
  };
  const at::Tensor everyones = ops::make_flat(group.size(), at::kByte, device);
  const at::Tensor all = ops::make_flat(group.size(), at::kByte, device);
  if (kinds.all_to_all) probe("all-to-all", [&] { return group.all_to_all(everyones, all); });
  const at::Tensor one = ops::make_flat(1, at::kByte, device);
  probe("all-gather", [&] { return group.all_gather(everyones, one); });
  if (!kinds.reduce_scatter) return;
  const at::Tensor mine = ops::make_flat(1, at::kFloat, device);
  const at::Tensor theirs = ops::make_flat(group.size(), at::kFloat, device);
  probe("reduce-scatter", [&] { return group.reduce_scatter(mine, theirs); });
}

}  // namespace fastsync::comm
