#include "scattered.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "../check.h"
#include "../ops/buffers.h"
#include "../ops/ops.h"
#include "flat.h"

namespace fastsync::engine {
namespace {

// Consecutive elements of a slot in one rank's region.
struct Part {
  ops::SlotLayout in_gradient;  // of the elements in memory order
  ops::SlotLayout in_sent;
};

class Scattered final : public Transport {
 public:
  Scattered(const ScatterSpec& spec, Slots& slots, std::shared_ptr<comm::Collective> group,
            std::shared_ptr<ops::BufferPool> pool)
      : spec_(spec),
        gradients_(*spec.gradients),
        slots_(slots),
        group_(std::move(group)),
        pool_(std::move(pool)),
        places_(slots.size()) {
    chunk_ = spec_.region + flag_count();
    for (int64_t r = 0; r < group_->size(); ++r) {
      for (int64_t i = 0; i < flag_count(); ++i) {
        flag_layouts_.push_back(ops::SlotLayout::run(r * chunk_ + spec_.region + i, 1));
      }
    }
    for (size_t i = 0; i < slots_.size(); ++i) cut(i);
  }

  void begin() override {
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (!face(i).is_same(slots_[i].grad())) continue;
      places_[i].faced = true;
      slots_[i].param->tensor.mutable_grad() = std::exchange(pending(i), at::Tensor());
    }
  }

  void take(size_t index, const Packing& how) override {
    Slot& slot = slots_[index];
    const auto bytes = slot.layout.numel * static_cast<int64_t>(c10::elementSize(dtype()));
    if (bytes < kEarlyBytes || !device().is_cpu()) return;
    check_gradient(slot, slot.grad());
    ensure_sent();
    ops::pack(items_of(index), sent_, how.scale);
    slot.early = true;
    give_up(index);
  }
  bool takes_once() const override { return true; }

  void pack(const Packing& how) override {
    ensure_sent();
    std::vector<ops::Item> all;
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].early) continue;
      const auto items = items_of(i);
      all.insert(all.end(), items.begin(), items.end());
    }
    append_flags(all, how);
    ops::pack(all, sent_, how.scale);
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (!slots_[i].early) give_up(i);
    }
  }

  // Gloo would reduce all of it on every rank: each sends the others their regions, and sums its own.
  std::unique_ptr<comm::InFlight> launch() override {
    sums_ = !device().is_cpu() || group_->is_memory();
    received_ = pool_->take(sums_ ? chunk_ : sent_.numel(), dtype(), device());
    return sums_ ? group_->reduce_scatter(received_, sent_) : group_->all_to_all(received_, sent_);
  }

  void receive(const at::Tensor& /*result*/) override {
    pool_->give(std::exchange(sent_, at::Tensor()));
    if (!flags_.defined()) {
      const auto wide = dtype() == at::kDouble ? at::kDouble : at::kFloat;
      flags_ = ops::make_flat(flag_count(), wide, device());
    }
    add_up({{flags_, spec_.region}}, false);
    if (device().is_cpu()) check_alike();
  }

  bool adds(size_t index) const override { return places_[index].faced; }

  void deliver(const std::vector<bool>& used) override {
    Targets fresh;
    Targets accumulated;
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (used[i]) deliver_slot(i, places_[i].faced ? accumulated : fresh);
    }
    add_up(fresh, false);
    add_up(accumulated, true);
    gradients_.shard.unsafeGetTensorImpl()->bump_version();
    pool_->give(std::exchange(received_, at::Tensor()));
    for (size_t i = 0; i < slots_.size(); ++i) {
      at::Tensor& grad = slots_[i].param->tensor.mutable_grad();
      const Place place = std::exchange(places_[i], Place{});
      if (used[i]) {
        grad = face(i);
      } else if (place.faced) {  // what no rank used stays as it was
        grad = face(i);
        pending(i) = place.kept;
      } else if (place.kept.defined()) {
        grad = place.kept;
      }
    }
  }

  // What has been packed is lost; a face comes back, and what autograd has accumulated since is pending.
  void restore() override {
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (!std::exchange(places_[i].faced, false)) continue;
      at::Tensor& grad = slots_[i].param->tensor.mutable_grad();
      pending(i) = grad.defined() ? grad : places_[i].kept;
      grad = face(i);
    }
  }

  void abandon(bool in_flight) override {
    for (at::Tensor* field : {&sent_, &received_}) {
      const at::Tensor buffer = std::exchange(*field, at::Tensor());
      if (in_flight) {
        pool_->forget(buffer);
      } else {
        pool_->give(buffer);
      }
    }
    restore();
    for (Place& place : places_) place = Place{};
  }

  Shadow shadow(uint64_t /*step*/) override {
    FS_CHECK(false, "sharded gradients cannot be joined");
    return {};
  }

  bool ends_early() const override { return true; }
  bool has_flags() const override { return flags_.defined(); }
  at::Tensor flags() const override {
    return flags_.narrow(0, 0, static_cast<int64_t>(slots_.size()));
  }
  at::Tensor vote() const override {
    if (!has_flags()) return {};
    const auto place = ops::SlotLayout::run(static_cast<int64_t>(slots_.size()), 1);
    return ops::view_of(flags_, place, flags_.scalar_type());
  }
  int64_t bytes() const override { return group_->size() * chunk_bytes(); }
  int64_t sent_bytes() const override {
    return group_->is_memory() ? 0 : (group_->size() - 1) * chunk_bytes();
  }

 private:
  // What is only known of a gradient while it travels.
  struct Place {
    bool faced = false;  // it is added to what was there before
    at::Tensor kept;     // a gradient that this rank did not use
  };
  // Tensors in one dimension, and where in each chunk that was received their terms begin.
  using Targets = std::vector<std::pair<at::Tensor, int64_t>>;

  at::Tensor& face(size_t slot) const { return gradients_.faces.at(spec_.members[slot]); }
  at::Tensor& pending(size_t slot) const { return gradients_.pending.at(spec_.members[slot]); }
  at::ScalarType dtype() const { return gradients_.shard.scalar_type(); }
  at::Device device() const { return gradients_.shard.device(); }
  // Used flags, the vote, and whether there was a face.
  int64_t flag_count() const { return 2 * static_cast<int64_t>(slots_.size()) + 1; }
  int64_t chunk_bytes() const { return chunk_ * static_cast<int64_t>(c10::elementSize(dtype())); }

  void cut(size_t index) {
    const ops::SlotLayout& slot = slots_[index].layout;
    parts_.emplace_back();
    mine_.emplace_back();
    for (int64_t r = 0; r < group_->size(); ++r) {
      const int64_t begin = std::max(slot.offset, r * spec_.region);
      const int64_t numel = std::min(slot.offset + slot.numel, (r + 1) * spec_.region) - begin;
      if (numel <= 0) continue;
      const int64_t in_region = begin - r * spec_.region;
      const auto sent = ops::SlotLayout::run(r * chunk_ + in_region, numel);
      parts_.back().push_back({ops::SlotLayout::run(begin - slot.offset, numel), sent});
      if (r != group_->rank()) continue;
      const auto kept = ops::SlotLayout::run(in_region, numel);
      mine_.back() = {ops::view_of(gradients_.shard, kept, dtype()), in_region};
    }
  }

  void ensure_sent() {
    if (!sent_.defined()) sent_ = pool_->take(group_->size() * chunk_, dtype(), device());
  }

  std::vector<ops::Item> items_of(size_t index) const {
    const Slot& slot = slots_[index];
    at::Tensor grad = slot.grad();
    if (grad.defined()) {
      check_gradient(slot, grad);
      if (!ops::in_slot_order(grad, slot.layout)) {
        grad = ops::make_strided(slot.layout.sizes, slot.layout.strides, grad.scalar_type(),
                                 grad.device());
        const at::NoGradGuard no_grad;
        grad.copy_(slot.grad());
      }
    }
    std::vector<ops::Item> items;
    for (const Part& part : parts_[index]) {
      at::Tensor elements;
      if (grad.defined()) elements = ops::view_of(grad, part.in_gradient, grad.scalar_type());
      items.push_back({elements, &part.in_sent});
    }
    return items;
  }

  void append_flags(std::vector<ops::Item>& items, const Packing& how) const {
    std::vector<float> flags;
    for (const Slot& slot : slots_) flags.push_back(used_flag(slot));
    flags.push_back(how.vote ? 1.0F : 0.0F);
    for (const Place& place : places_) flags.push_back(place.faced ? 1.0F : 0.0F);
    for (size_t i = 0; i < flag_layouts_.size(); ++i) {
      items.push_back({at::Tensor(), &flag_layouts_[i], flags[i % flags.size()]});
    }
  }

  // Each rank keeps only its region of what was there before: all have to add to it, or none.
  void check_alike() const {
    const at::Tensor flags = flags_.to(at::kFloat);
    const float* faced = flags.const_data_ptr<float>() + slots_.size() + 1;
    for (size_t i = 0; i < slots_.size(); ++i) {
      FS_CHECK(faced[i] == 0.0F || faced[i] == static_cast<float>(group_->size()), "parameter '",
               slots_[i].param->name, "': ", faced[i], " of ", group_->size(),
               " ranks had a gradient of an earlier backward, the others had none. With zero, "
               "gradients are zeroed on every rank or on none");
    }
  }

  // The gradient has been packed. One that this rank did not use may have to stay.
  void give_up(size_t index) {
    at::Tensor& grad = slots_[index].param->tensor.mutable_grad();
    if (!slots_[index].param->used) places_[index].kept = grad;
    grad = at::Tensor();
  }

  void deliver_slot(size_t index, Targets& targets) {
    const size_t member = spec_.members[index];
    if (!places_[index].faced) {
      if (gradients_.is_held(member)) gradients_.release(member);
      pending(index) = at::Tensor();
    }
    if (mine_[index].first.defined()) targets.push_back(mine_[index]);
  }

  // targets = sum over ranks, in their order; added to what they hold where `accumulate`.
  void add_up(const Targets& targets, bool accumulate) const {
    if (targets.empty()) return;
    for (int64_t r = 0; r < (sums_ ? 1 : group_->size()); ++r) {
      std::vector<ops::SlotLayout> layouts;
      for (const auto& [tensor, begin] : targets) {
        layouts.push_back(ops::SlotLayout::run(r * chunk_ + begin, tensor.numel()));
      }
      std::vector<ops::Item> items;
      for (size_t i = 0; i < targets.size(); ++i) items.push_back({targets[i].first, &layouts[i]});
      ops::unpack(items, received_, 1.0, accumulate || r > 0);
    }
  }

  ScatterSpec spec_;
  ShardedGradients& gradients_;
  Slots& slots_;
  std::shared_ptr<comm::Collective> group_;
  std::shared_ptr<ops::BufferPool> pool_;
  int64_t chunk_ = 0;                                 // elements for each rank, flags included
  std::vector<std::vector<Part>> parts_;              // by slot
  std::vector<std::pair<at::Tensor, int64_t>> mine_;  // by slot: of the shard, and of its region
  std::vector<ops::SlotLayout> flag_layouts_;         // by rank, then one per slot and the vote
  std::vector<Place> places_;                         // by slot
  at::Tensor sent_;
  at::Tensor received_;
  at::Tensor flags_;
  bool sums_ = false;  // the backend does
};

}  // namespace

std::unique_ptr<Transport> make_scattered(const ScatterSpec& spec, Slots& slots,
                                          std::shared_ptr<comm::Collective> group,
                                          std::shared_ptr<ops::BufferPool> pool) {
  return std::make_unique<Scattered>(spec, slots, std::move(group), std::move(pool));
}

}  // namespace fastsync::engine
