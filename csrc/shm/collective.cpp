#include "shm/collective.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "check.h"
#include "kernels/sum.h"
#include "ops/buffers.h"
#include "ops/items.h"
#include "ops/parallel.h"

namespace fastsync::comm {
namespace {

// `chunks` of the work, on the intra-op threads.
void help(Channel& channel, const Channel::Sum& sum, int64_t chunks) {
  constexpr int64_t kElements = Channel::kChunkBytes / 4;
  ops::parallel_ranges(chunks, kElements,
                       [&](int64_t begin, int64_t end) { channel.help(sum, end - begin); });
}

int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

}  // namespace

// For callers that ask again and again instead of waiting: the same time limit applies.
class Patience {
 public:
  // Returns what it is given. Throws what Channel::wait() throws once that took too long.
  bool is_over(bool done, const Channel& channel, const Channel::Sum& sum) {
    const auto now = std::chrono::steady_clock::now();
    if (!since_) since_ = now;
    if (!done && now - *since_ > channel.timeout()) channel.give_up(sum);
    return done;
  }

 private:
  std::optional<std::chrono::steady_clock::time_point> since_;  // the first question
};

// An exchange that this rank has joined, and what others have joined it with.
class Joined {
 public:
  Joined(std::shared_ptr<Channel> channel, const Channel::Sum& exchange)
      : channel_(std::move(channel)), exchange_(exchange) {}
  // No rank shall wait for one that will not read.
  ~Joined() { done_reading(); }
  Joined(const Joined&) = delete;
  Joined& operator=(const Joined&) = delete;

  void meet() { channel_->meet(exchange_); }
  void wait() { channel_->wait(exchange_); }
  bool is_within(Channel::Until until, std::chrono::milliseconds time) {
    return patience_.is_over(channel_->wait_for(exchange_, time, until), *channel_, exchange_);
  }

  const std::shared_ptr<Channel>& channel() const { return channel_; }
  // By rank, this one's among them. Once all have joined, and before done_reading().
  std::vector<const std::byte*> parts() const {
    std::vector<const std::byte*> found;
    for (size_t r = 0; r < channel_->ranks(); ++r) found.push_back(channel_->part_of(exchange_, r));
    return found;
  }
  void done_reading() {
    if (!std::exchange(read_, true)) channel_->done_reading(exchange_);
  }

 private:
  std::shared_ptr<Channel> channel_;
  Channel::Sum exchange_;
  Patience patience_;
  bool read_ = false;
};

// A sum that this rank has joined. All ranks use the memory until it is finished, whether or not
// one waits.
class ShmCollective::Started final : public InFlight {
 public:
  // `written`: where the sum goes.
  Started(std::shared_ptr<Channel> channel, const Channel::Part& part,
          std::vector<at::Tensor> written)
      : channel_(std::move(channel)), written_(std::move(written)), sum_(channel_->join(part)) {}

  void on_done(std::function<void()> fn) override {
    on_done_ = std::move(fn);
    if (done_) call();
  }

  // Does this rank's part, where all have joined. Returns whether the sum is finished.
  bool advance() {
    if (done_) return true;
    if (!helped_ && channel_->all_joined(sum_)) {
      helped_ = true;
      help(*channel_, sum_, channel_->share(sum_));
    }
    return channel_->is_finished(sum_) && finish();
  }

  at::Tensor wait() override {
    if (done_) return {};
    channel_->meet(sum_);
    help(*channel_, sum_, sum_.chunks);
    channel_->wait(sum_);
    finish();
    return {};
  }

  const Channel::Sum& sum() const { return sum_; }
  const std::vector<at::Tensor>& written() const { return written_; }  // none once it is finished

  bool is_done_within(std::chrono::milliseconds time) override {
    return done_ ||
           (patience_.is_over(channel_->wait_for(sum_, time), *channel_, sum_) && finish());
  }
  bool can_be_asked() const override { return true; }

 private:
  bool finish() {
    done_ = true;
    written_.clear();
    call();
    return true;
  }

  void call() {
    if (on_done_) std::exchange(on_done_, nullptr)();
  }

  std::shared_ptr<Channel> channel_;
  std::vector<at::Tensor> written_;
  Channel::Sum sum_;
  Patience patience_;
  bool helped_ = false;
  bool done_ = false;
  std::function<void()> on_done_;
};

// An exchange, and what this rank does with the others' parts. Reads when it is waited for.
class ShmCollective::Reading final : public CalledByWait<> {
 public:
  // `whole`: the exchange must be over on every rank, because it reads memory that may be written
  // to afterwards.
  Reading(std::shared_ptr<Channel> channel, const Channel::Sum& exchange, bool whole,
          std::function<void(const Parts&)> read)
      : exchange_(std::move(channel), exchange), whole_(whole), read_(std::move(read)) {}

  at::Tensor wait() override {
    if (read_) {
      exchange_.meet();
      read();
    }
    if (whole_) exchange_.wait();
    call();
    return {};
  }

  bool is_done_within(std::chrono::milliseconds time) override {
    if (read_) {
      if (!exchange_.is_within(Channel::Until::kJoined, time)) return false;
      read();
    }
    return !whole_ || exchange_.is_within(Channel::Until::kFinished, time);
  }
  bool can_be_asked() const override { return true; }

 private:
  void read() {
    std::exchange(read_, nullptr)(exchange_.parts());
    exchange_.done_reading();
  }

  Joined exchange_;
  bool whole_;
  std::function<void(const Parts&)> read_;  // null once it has been called
};

// Data of the other ranks for this one, read in place.
class ShmCollective::Borrowed final : public CalledByWait<Incoming> {
 public:
  // `sent`: a tensor like the others'.
  Borrowed(std::shared_ptr<Channel> channel, const Channel::Sum& exchange, int rank,
           const at::Tensor& sent)
      : exchange_(std::move(channel), exchange),
        rank_(rank),
        numel_(sent.numel()),
        dtype_(sent.scalar_type()) {}

  at::Tensor wait() override {
    exchange_.meet();
    if (parts_.empty()) find_parts();
    call();
    return {};
  }
  bool is_done_within(std::chrono::milliseconds time) override {
    return exchange_.is_within(Channel::Until::kJoined, time);
  }
  bool can_be_asked() const override { return true; }

  const std::vector<at::Tensor>& parts() const override { return parts_; }
  void release() override {
    parts_.clear();
    exchange_.done_reading();
  }

 private:
  void find_parts() {
    const Parts shown = exchange_.parts();
    const auto ranks = static_cast<int>(shown.size());
    const int64_t each = numel_ / (ranks - 1);
    for (int r = 0; r < ranks; ++r) {
      if (r == rank_) continue;
      const int64_t place = rank_ < r ? rank_ : rank_ - 1;  // among those that rank r sends to
      const auto offset = place * each * static_cast<int64_t>(c10::elementSize(dtype_));
      // The memory that others show is not written to.
      auto* const part = const_cast<std::byte*>(shown[size_t(r)]) + offset;
      parts_.push_back(ops::make_over(part, each, dtype_, [channel = exchange_.channel()] {}));
    }
  }

  Joined exchange_;
  int rank_;
  int64_t numel_;
  at::ScalarType dtype_;
  std::vector<at::Tensor> parts_;
};

ShmCollective::ShmCollective(std::shared_ptr<SharedMemory> memory, size_t channel)
    : memory_(std::move(memory)),
      channel_(memory_->make_channel(channel, memory_->timeout())),
      pool_(std::make_shared<ops::BufferPool>(
          [memory = memory_](int64_t numel, at::ScalarType dtype, at::Device /*device*/) {
            return memory->make_flat(numel, dtype);
          })) {
  pool_->reclaim_with([this](bool pressed) {
    if (pressed) await_readers();
    take_back();
  });
}

// [Note: memory that stays after its collective]
// Pages that are not taken any longer become zeros. Another rank that comes to a sum or an exchange
// later than this rank's engine goes, as in the last step of a training or after an error here,
// would read those. So memory that this rank has joined with is kept until everything is finished.
// Where that does not happen soon, its pages stay for as long as any rank maps them: within one
// time limit for all unfinished work, because a rank that delays one piece delays all.
ShmCollective::~ShmCollective() {
  pool_->reclaim_with(nullptr);
  constexpr std::chrono::milliseconds kSoon{200};
  const auto end = std::chrono::steady_clock::now() + kSoon;
  for (const Posted& posted : posted_) {
    if (!ends_by(end, posted.exchange)) memory_->leave(posted.shown);
  }
  for (const auto& sum : started_) {
    if (ends_by(end, sum->sum())) continue;
    for (const at::Tensor& tensor : sum->written()) memory_->leave(tensor);
  }
}

bool ShmCollective::ends_by(std::chrono::steady_clock::time_point end,
                            const Channel::Sum& sum) const {
  const auto left = end - std::chrono::steady_clock::now();
  try {
    return channel_->is_finished(sum) ||
           channel_->wait_for(
               sum, std::max(std::chrono::milliseconds(0),
                             std::chrono::duration_cast<std::chrono::milliseconds>(left)));
  } catch (const std::exception&) {
    return false;  // some have ended, the others may still come
  }
}

at::Tensor ShmCollective::make_flat(int64_t numel, at::ScalarType dtype, at::Device /*device*/) {
  return memory_->make_flat(numel, dtype);
}

std::unique_ptr<InFlight> ShmCollective::all_reduce_and_square(const at::Tensor& flat,
                                                               const at::Tensor& squares,
                                                               int64_t squared) {
  const auto place = memory_->place_of(flat);
  FS_ASSERT(place, "a buffer that is not shared");
  make_progress();
  Channel::Part part{*place, flat.numel(), ops::kernel_dtype(flat.scalar_type()), 0, 0};
  if (squares.defined()) {
    part.squares = *memory_->place_of(squares);
    part.squared = squared;
  }
  const auto sum = std::make_shared<Started>(channel_, part, std::vector{flat, squares});
  started_.push_back(sum);
  make_progress();  // perhaps to its end
  return std::make_unique<SharedInFlight>(sum);
}

at::Tensor ShmCollective::make_squares(const at::Tensor& flat) {
  const auto dtype = ops::kernel_dtype(flat.scalar_type());
  return memory_->make_flat(Channel::chunks_of(flat.numel(), dtype), at::kDouble);
}

void ShmCollective::make_progress() {
  for (const auto& sum : started_) sum->advance();
  while (!started_.empty() && started_.front()->advance()) started_.pop_front();
}

std::unique_ptr<InFlight> ShmCollective::all_to_all(const at::Tensor& received,
                                                    const at::Tensor& sent) {
  return show(sent, [received, mine = rank(), ranks = size()](const Parts& parts) {
    const int64_t each = bytes_of(received) / ranks;
    auto* to = static_cast<std::byte*>(received.mutable_data_ptr());
    for (const std::byte* part : parts) {
      copy_bytes(to, part + mine * each, each);
      to += each;
    }
  });
}

std::shared_ptr<Incoming> ShmCollective::all_to_others(
    const at::Tensor& sent, const std::shared_ptr<ops::BufferPool>& pool) {
  FS_ASSERT(pool == pool_ && memory_->place_of(sent), "a buffer that is not shared");
  return std::make_shared<Borrowed>(channel_, post(sent, /*pooled=*/true).exchange, rank(), sent);
}

std::unique_ptr<InFlight> ShmCollective::all_gather(const at::Tensor& gathered,
                                                    const at::Tensor& mine) {
  const auto read = [gathered](const Parts& parts) {
    const int64_t each = bytes_of(gathered) / static_cast<int64_t>(parts.size());
    auto* to = static_cast<std::byte*>(gathered.mutable_data_ptr());
    for (const std::byte* part : parts) {
      if (part != to) copy_bytes(to, part, each);
      to += each;
    }
  };
  return show(mine, read, /*gathers=*/true);
}

std::unique_ptr<InFlight> ShmCollective::reduce_scatter(const at::Tensor& mine,
                                                        const at::Tensor& all) {
  return show(all, [mine, place = rank()](const Parts& parts) {
    std::vector<const void*> terms;
    for (const std::byte* part : parts) terms.push_back(part + place * bytes_of(mine));
    kernels::sum_cpu(mine.mutable_data_ptr(), terms.data(), terms.size(), mine.numel(),
                     ops::kernel_dtype(mine.scalar_type()));
  });
}

std::unique_ptr<InFlight> ShmCollective::exchange(std::vector<Message> /*received*/,
                                                  std::vector<Message> /*sent*/, int /*tag*/) {
  FS_ASSERT(false, "memory has no messages");
  return nullptr;
}

std::unique_ptr<InFlight> ShmCollective::show(const at::Tensor& sent,
                                              std::function<void(const Parts&)> read,
                                              bool gathers) {
  const bool staged = !memory_->place_of(sent);
  const Posted& posted = post(staged ? stage(sent) : sent, /*pooled=*/staged, gathers);
  auto note = [read = std::move(read), has_read = posted.read](const Parts& parts) {
    read(parts);
    *has_read = true;
  };
  return std::make_unique<Reading>(channel_, posted.exchange, !staged, std::move(note));
}

const ShmCollective::Posted& ShmCollective::post(const at::Tensor& shown, bool pooled,
                                                 bool gathers) {
  take_back();
  const auto exchange =
      channel_->join_exchange(*memory_->place_of(shown), bytes_of(shown), gathers);
  return posted_.emplace_back(Posted{exchange, shown, pooled, std::make_shared<bool>(false)});
}

// Takes back the buffers that all ranks have read.
void ShmCollective::take_back() {
  while (!posted_.empty() && channel_->is_finished(posted_.front().exchange)) {
    if (posted_.front().pooled) pool_->give(posted_.front().shown);
    posted_.pop_front();
  }
}

// [Note: one copy instead of two]
// A rank that is ahead would need memory for one copy more whenever the others have not read its
// last one. That they are about to: what this rank has read itself all have joined, so they can
// read it without anything of this rank's. They all wait for the slowest in the end, so a short
// wait here costs next to nothing, and memory does not depend on which rank is ahead.
void ShmCollective::await_readers() const {
  constexpr std::chrono::milliseconds kMoment{200};
  const auto end = std::chrono::steady_clock::now() + kMoment;
  for (const Posted& posted : posted_) {
    if (!posted.pooled || !*posted.read || !ends_by(end, posted.exchange)) return;
  }
}

// A copy in this rank's memory.
at::Tensor ShmCollective::stage(const at::Tensor& sent) {
  const at::Tensor copy = pool_->take(sent.numel(), sent.scalar_type(), sent.device());
  copy_bytes(copy.mutable_data_ptr(), static_cast<const std::byte*>(sent.const_data_ptr()),
             bytes_of(sent));
  return copy;
}

}  // namespace fastsync::comm
