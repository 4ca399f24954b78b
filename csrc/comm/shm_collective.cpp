#include "shm_collective.h"

#include <functional>
#include <utility>

#include "../check.h"
#include "../ops/buffers.h"
#include "../ops/items.h"

namespace fastsync::comm {
namespace {

// `chunks` of the work, on the intra-op threads.
void help(Channel& channel, const Channel::Sum& sum, int64_t chunks) {
  constexpr int64_t kElements = Channel::kChunkBytes / 4;
  ops::parallel_ranges(chunks, kElements,
                       [&](int64_t begin, int64_t end) { channel.help(sum, end - begin); });
}

}  // namespace

// A sum that this rank has joined. The memory is everybody's until it is finished, whether or not anybody waits.
class ShmCollective::Started {
 public:
  Started(std::shared_ptr<Channel> channel, const Channel::Part& part, at::Tensor flat)
      : channel_(std::move(channel)), flat_(std::move(flat)), sum_(channel_->join(part)) {}

  void on_done(std::function<void()> fn) {
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

  void wait() {
    if (done_) return;
    channel_->meet(sum_);
    help(*channel_, sum_, sum_.chunks);
    channel_->wait(sum_);
    finish();
  }

  bool is_done_within(std::chrono::milliseconds time) {
    return done_ || (channel_->wait_for(sum_, time) && finish());
  }

 private:
  bool finish() {
    done_ = true;
    flat_ = at::Tensor();
    call();
    return true;
  }

  void call() {
    if (on_done_) std::exchange(on_done_, nullptr)();
  }

  std::shared_ptr<Channel> channel_;
  at::Tensor flat_;
  Channel::Sum sum_;
  bool helped_ = false;
  bool done_ = false;
  std::function<void()> on_done_;
};

class ShmCollective::WaitsForSum final : public InFlight {
 public:
  explicit WaitsForSum(std::shared_ptr<Started> started) : started_(std::move(started)) {}

  at::Tensor wait() override {
    started_->wait();
    return {};
  }
  void on_done(std::function<void()> fn) override { started_->on_done(std::move(fn)); }
  bool is_done_within(std::chrono::milliseconds time) override {
    return started_->is_done_within(time);
  }

 private:
  std::shared_ptr<Started> started_;
};

ShmCollective::ShmCollective(int64_t bytes) : mine_(Segment::make(static_cast<size_t>(bytes))) {}

void ShmCollective::connect(const std::vector<SegmentAddress>& addresses, int64_t rank,
                            double timeout) {
  std::vector<std::shared_ptr<Segment>> segments;
  for (size_t r = 0; r < addresses.size(); ++r) {
    const bool own = static_cast<int64_t>(r) == rank;
    segments.push_back(own ? mine_ : Segment::open(addresses[r]));
  }
  ranks_ = segments.size();
  const auto limit = std::chrono::duration<double>(timeout);
  channel_ =
      std::make_shared<Channel>(std::move(segments), static_cast<size_t>(rank),
                                std::chrono::duration_cast<std::chrono::milliseconds>(limit));
}

at::Tensor ShmCollective::make_flat(int64_t numel, at::ScalarType dtype, at::Device /*device*/) {
  const auto bytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  const size_t offset = mine_->take(bytes);
  return ops::make_over(mine_->data() + offset, numel, dtype,
                        [segment = mine_, offset] { segment->give(offset); });
}

std::unique_ptr<InFlight> ShmCollective::all_reduce(const at::Tensor& flat) {
  const auto* const data = static_cast<const std::byte*>(flat.const_data_ptr());
  const std::byte* const begin = mine_->data();
  FS_ASSERT(data >= begin && data < begin + mine_->address().bytes, "a buffer that is not shared");
  make_progress();
  const Channel::Part part{static_cast<size_t>(data - begin), flat.numel(),
                           ops::kernel_dtype(flat.scalar_type())};
  const auto sum = std::make_shared<Started>(channel_, part, flat);
  started_.push_back(sum);
  make_progress();  // perhaps to its end
  return std::make_unique<WaitsForSum>(sum);
}

void ShmCollective::make_progress() {
  for (const auto& sum : started_) sum->advance();
  while (!started_.empty() && started_.front()->advance()) started_.pop_front();
}

}  // namespace fastsync::comm
