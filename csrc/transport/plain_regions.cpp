#include <ATen/core/grad_mode.h>

#include <utility>

#include "../ops/ops.h"
#include "coding.h"
#include "regions.h"

namespace fastsync::engine {
namespace {

constexpr int64_t kChunkAlignment = 16;  // elements

// Between CPUs each rank sends the others their chunks and keeps its own: Gloo's reduce-scatter
// would reduce all of them everywhere. On devices the backend sums.
class PlainRegions final : public Regions {
 public:
  PlainRegions(const RegionLayout& layout, at::TensorOptions like,
               std::shared_ptr<comm::Collective> group, std::shared_ptr<ops::BufferPool> pool)
      : layout_(layout), like_(like), group_(std::move(group)), pool_(std::move(pool)) {
    stride_ =
        (layout_.numel + layout_.flags + kChunkAlignment - 1) / kChunkAlignment * kChunkAlignment;
  }

  bool leaves_own() const override { return like_.device().is_cpu(); }

  ops::SlotLayout place_of(const RegionPart& part) const override {
    const bool later = leaves_own() && part.chunk > layout_.mine;
    return ops::SlotLayout::run((part.chunk - (later ? 1 : 0)) * stride_ + part.place, part.numel);
  }

  void take(const std::vector<ops::Item>& items, const Packing& how) override {
    if (!items.empty()) ops::pack(items, sent(), how.scale);
  }

  void close(const std::vector<float>& flags, const Packing& how) override {
    std::vector<FlagRun> runs;
    for (int64_t chunk = 0; chunk < sent_chunks(); ++chunk) {
      for (FlagRun& run : runs_of(flags, chunk * stride_ + layout_.numel)) {
        runs.push_back(std::move(run));
      }
    }
    std::vector<ops::Item> items;
    for (const FlagRun& run : runs) items.push_back({at::Tensor(), &run.layout, run.value});
    take(items, how);
    if (how.infinities.defined()) add_to_flags(how.infinities);
    if (leaves_own()) own_flags_ = flags;
  }

  std::unique_ptr<comm::InFlight> launch() override {
    if (leaves_own()) {
      incoming_ = group_->all_to_others(sent_, pool_);
      sent_ = at::Tensor();
      return std::make_unique<comm::SharedInFlight>(incoming_);
    }
    const auto mine = ops::SlotLayout::run(group_->rank() * stride_, stride_);
    sum_ = {ops::view_of(sent_, mine, dtype())};  // in place, as backends of devices can
    return group_->reduce_scatter(sum_.front(), sent_);
  }

  void sum_flags(const at::Tensor& flags) const override {
    if (leaves_own()) write_flags(own_flags_, flags);
    const auto after_parts = ops::SlotLayout::run(layout_.numel, layout_.flags);
    sum({{flags, &after_parts}}, /*accumulate=*/leaves_own());
  }

  void sum(const std::vector<ops::Item>& items, bool accumulate) const override {
    if (items.empty()) return;
    for (const at::Tensor& term : leaves_own() ? incoming_->parts() : sum_) {
      ops::unpack(items, term, 1.0, accumulate);
      accumulate = true;
    }
  }

  void end(bool in_flight) override {
    if (incoming_ && !in_flight) incoming_->release();
    incoming_ = nullptr;
    sum_.clear();
    pool_->end(std::exchange(sent_, at::Tensor()), in_flight);
  }

  int64_t bytes() const override { return sent_chunks() * chunk_bytes(); }
  int64_t sent_bytes() const override {
    return group_->leaving((layout_.chunks - 1) * chunk_bytes());
  }

 private:
  at::ScalarType dtype() const { return c10::typeMetaToScalarType(like_.dtype()); }
  int64_t chunk_bytes() const { return stride_ * static_cast<int64_t>(c10::elementSize(dtype())); }
  int64_t sent_chunks() const { return layout_.chunks - (leaves_own() ? 1 : 0); }

  void add_to_flags(const at::Tensor& added) const {
    const at::NoGradGuard no_grad;
    const at::Tensor chunks = sent_.view({sent_chunks(), stride_});
    chunks.narrow(1, layout_.numel, added.numel()).add_(added);
  }

  const at::Tensor& sent() {
    if (!sent_.defined()) sent_ = pool_->take(sent_chunks() * stride_, dtype(), like_.device());
    return sent_;
  }

  RegionLayout layout_;
  at::TensorOptions like_;
  std::shared_ptr<comm::Collective> group_;
  std::shared_ptr<ops::BufferPool> pool_;
  int64_t stride_ = 0;  // elements from chunk to chunk
  std::vector<float> own_flags_;
  at::Tensor sent_;
  std::shared_ptr<comm::Incoming> incoming_;  // data of the other ranks, to add up here
  std::vector<at::Tensor> sum_;               // or the backend's sum, part of `sent_`
};

}  // namespace

std::unique_ptr<Regions> make_plain_regions(const RegionLayout& layout, at::TensorOptions like,
                                            std::shared_ptr<comm::Collective> group,
                                            std::shared_ptr<ops::BufferPool> pool) {
  return std::make_unique<PlainRegions>(layout, like, std::move(group), std::move(pool));
}

}  // namespace fastsync::engine
