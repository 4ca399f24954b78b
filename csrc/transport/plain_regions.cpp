#include <utility>

#include "../ops/ops.h"
#include "regions.h"

namespace fastsync::engine {
namespace {

constexpr int64_t kChunkAlignment = 16;  // elements

// Between CPUs each rank sends the others their chunks and keeps its own: Gloo's reduce-scatter would reduce all of them
// everywhere. On devices the backend adds up.
class PlainRegions final : public Regions {
 public:
  PlainRegions(const RegionLayout& layout, at::TensorOptions like,
               std::shared_ptr<comm::Collective> group, std::shared_ptr<ops::BufferPool> pool)
      : layout_(layout), like_(like), group_(std::move(group)), pool_(std::move(pool)) {
    stride_ =
        (layout_.numel + layout_.flags + kChunkAlignment - 1) / kChunkAlignment * kChunkAlignment;
    for (int64_t chunk = 0; chunk < sent_chunks(); ++chunk) {
      for (int64_t i = 0; i < layout_.flags; ++i) {
        flag_layouts_.push_back(ops::SlotLayout::run(chunk * stride_ + layout_.numel + i, 1));
      }
    }
    for (int64_t i = 0; i < layout_.flags; ++i) {
      own_flag_layouts_.push_back(ops::SlotLayout::run(i, 1));
    }
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
    std::vector<ops::Item> items;
    for (size_t i = 0; i < flag_layouts_.size(); ++i) {
      items.push_back({at::Tensor(), &flag_layouts_[i], flags[i % flags.size()]});
    }
    take(items, how);
    own_flags_ = flags;
  }

  std::unique_ptr<comm::InFlight> launch() override {
    received_ = pool_->take(sources() * stride_, dtype(), like_.device());
    return leaves_own() ? group_->all_to_others(received_, sent_)
                        : group_->reduce_scatter(received_, sent_);
  }

  void sum_flags(const at::Tensor& flags) const override {
    if (leaves_own()) {
      std::vector<ops::Item> mine;
      for (size_t i = 0; i < own_flags_.size(); ++i) {
        mine.push_back({at::Tensor(), &own_flag_layouts_[i], own_flags_[i]});
      }
      ops::pack(mine, flags, 1.0);
    }
    const auto behind = ops::SlotLayout::run(layout_.numel, layout_.flags);
    sum({{flags, &behind}}, /*accumulate=*/leaves_own());
  }

  void sum(const std::vector<ops::Item>& items, bool accumulate) const override {
    if (items.empty()) return;
    for (int64_t source = 0; source < sources(); ++source) {
      std::vector<ops::SlotLayout> layouts;
      for (const ops::Item& item : items) {
        layouts.push_back(
            ops::SlotLayout::run(source * stride_ + item.layout->offset, item.layout->numel));
      }
      std::vector<ops::Item> terms = items;
      for (size_t i = 0; i < terms.size(); ++i) terms[i].layout = &layouts[i];
      ops::unpack(terms, received_, 1.0, accumulate || source > 0);
    }
  }

  void end(bool in_flight) override {
    for (at::Tensor* field : {&sent_, &received_}) {
      const at::Tensor buffer = std::exchange(*field, at::Tensor());
      if (in_flight) {
        pool_->forget(buffer);
      } else {
        pool_->give(buffer);
      }
    }
  }

  int64_t bytes() const override { return sent_chunks() * chunk_bytes(); }
  int64_t sent_bytes() const override {
    return group_->is_memory() ? 0 : (layout_.chunks - 1) * chunk_bytes();
  }

 private:
  at::ScalarType dtype() const { return c10::typeMetaToScalarType(like_.dtype()); }
  int64_t chunk_bytes() const { return stride_ * static_cast<int64_t>(c10::elementSize(dtype())); }
  int64_t sent_chunks() const { return layout_.chunks - (leaves_own() ? 1 : 0); }
  int64_t sources() const { return leaves_own() ? layout_.chunks - 1 : 1; }

  const at::Tensor& sent() {
    if (!sent_.defined()) sent_ = pool_->take(sent_chunks() * stride_, dtype(), like_.device());
    return sent_;
  }

  RegionLayout layout_;
  at::TensorOptions like_;
  std::shared_ptr<comm::Collective> group_;
  std::shared_ptr<ops::BufferPool> pool_;
  int64_t stride_ = 0;                         // elements from chunk to chunk
  std::vector<ops::SlotLayout> flag_layouts_;  // chunk by chunk
  std::vector<ops::SlotLayout> own_flag_layouts_;
  std::vector<float> own_flags_;
  at::Tensor sent_;
  at::Tensor received_;
};

}  // namespace

std::unique_ptr<Regions> make_plain_regions(const RegionLayout& layout, at::TensorOptions like,
                                            std::shared_ptr<comm::Collective> group,
                                            std::shared_ptr<ops::BufferPool> pool) {
  return std::make_unique<PlainRegions>(layout, like, std::move(group), std::move(pool));
}

}  // namespace fastsync::engine
