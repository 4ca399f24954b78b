#include "scattered.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "../check.h"
#include "../ops/buffers.h"
#include "../ops/checks.h"
#include "../ops/ops.h"
#include "../ops/parallel.h"
#include "flat.h"

namespace fastsync::engine {
namespace {

// Elements that stay in a core's own cache between two reads.
constexpr size_t kBatch = size_t{1} << 17;

// The part of a slot that one rank owns.
struct Part {
  ops::SlotLayout in_gradient;  // of the elements in memory order
  ops::SlotLayout in_sent;
  ops::SlotLayout in_residual;
  bool mine = false;
};

class Scattered final : public Transport {
 public:
  Scattered(const ScatterSpec& spec, Slots& slots, std::unique_ptr<Regions> regions)
      : spec_(spec),
        gradients_(*spec.gradients),
        slots_(slots),
        regions_(std::move(regions)),
        parts_(slots.size()),
        mine_(slots.size()),
        places_(slots.size()) {
    FS_ASSERT(spec_.layout.flags == 2 * static_cast<int64_t>(slots.size()) + 1, "other flags");
    for (const RegionPart& part : spec_.parts) add_part(part);
    for (size_t i = 0; i < slots.size(); ++i) {
      slots[i].proxy = &proxy(i);
      slots[i].pending = &pending(i);
    }
  }

  void take(size_t index, const Packing& how) override {
    Slot& slot = slots_[index];
    const auto bytes = slot.layout.numel * static_cast<int64_t>(c10::elementSize(dtype()));
    const bool pays = bytes >= kEarlyBytes && device().is_cpu() && regions_->works_on_parts();
    if (!pays || !slot.param->used) return;
    check_gradient(slot, slot.grad());
    take_parts({index}, how);
    slot.early = true;
    give_up(index);
  }
  bool takes_once() const override { return true; }

  void pack(const Packing& how) override {
    if (how.missed && regions_->residual_bytes() > 0) keep_residuals();
    std::vector<size_t> late;
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (!slots_[i].early) late.push_back(i);
    }
    take_parts(late, how);
    regions_->close(flags_to_send(how), how);
    for (const size_t i : late) give_up(i);
  }

  std::unique_ptr<comm::InFlight> launch() override { return regions_->launch(); }

  void receive(const at::Tensor& /*result*/) override {
    if (!flags_.defined()) {
      const auto wide = dtype() == at::kDouble ? at::kDouble : at::kFloat;
      flags_ = ops::make_flat(spec_.layout.flags, wide, device());
    }
    regions_->sum_flags(flags_);
    if (device().is_cpu()) check_alike();
  }

  bool adds(size_t index) const override { return places_[index].faced; }

  void deliver(const std::vector<bool>& used) override {
    std::vector<size_t> fresh;
    std::vector<size_t> accumulated;
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (!used[i]) continue;
      if (!places_[i].faced) make_fresh(i);
      (places_[i].faced ? accumulated : fresh).push_back(i);
    }
    Squares squares;
    add_up(fresh, regions_->leaves_own(), squares);
    if (own_.defined()) ops::unpack(items_of(accumulated), own_, 1.0, true);
    add_up(accumulated, true, squares);
    bump_version(squares);
    if (!kept_.empty()) put_back_residuals(used);
    end(/*in_flight=*/false);
    for (size_t i = 0; i < slots_.size(); ++i) {
      const Place place = std::exchange(places_[i], Place{});
      if (used[i]) {
        slots_[i].param->tensor.mutable_grad() = proxy(i);
      } else if (place.kept.defined()) {  // used by no rank: stays as it was
        slots_[i].mutable_grad() = place.kept;
      }
    }
  }

  void abandon(bool in_flight) override {
    end(in_flight);
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
  int64_t bytes() const override { return regions_->bytes(); }
  int64_t sent_bytes() const override { return regions_->sent_bytes(); }
  int64_t between_nodes_bytes() const override { return regions_->between_nodes_bytes(); }

  int64_t residual_bytes() const override { return regions_->residual_bytes(); }

  void read(Residuals& residuals) const override {
    if (residual_bytes() == 0) return;
    const at::Tensor flat = regions_->residual();
    for (size_t i = 0; i < slots_.size(); ++i) {
      residuals.at(slots_[i].index) = residual_in(flat, i);
    }
  }

  void load(const Residuals& residuals) override {
    if (residual_bytes() == 0) return;
    const at::Tensor flat = regions_->residual();
    for (size_t i = 0; i < slots_.size(); ++i) {
      set_residual(flat, i, residuals.at(slots_[i].index));
    }
    regions_->load_residual(flat);
  }

 private:
  // State of a gradient while it travels.
  struct Place {
    bool faced = false;  // the average is added to the gradient before
    at::Tensor kept;     // a gradient that this rank did not use
  };
  // Consecutive elements of the shard, and where they lie in this rank's chunk.
  struct Block {
    at::Tensor elements;
    ops::SlotLayout in_chunk;
  };
  // The part of a slot that this rank keeps; no blocks where it keeps nothing.
  struct Mine {
    ops::SlotLayout in_shard;
    ops::SlotLayout in_chunk;
    std::vector<Block> blocks;
  };
  // Sums of squares of members' averages.
  struct Squares {
    std::vector<size_t> members;
    std::vector<double> sums;
  };
  // Blocks whose averages are summed up at once.
  struct Batch {
    std::vector<ops::Item> items;
    std::vector<size_t> entries;  // of Squares, by item
  };

  at::Tensor& proxy(size_t slot) const { return gradients_.proxies.at(spec_.members[slot]); }
  at::Tensor& pending(size_t slot) const { return gradients_.pending.at(spec_.members[slot]); }
  at::ScalarType dtype() const { return gradients_.shard.scalar_type(); }
  at::Device device() const { return gradients_.shard.device(); }

  void add_part(const RegionPart& part) {
    const RegionLayout& layout = spec_.layout;
    const bool mine = part.chunk == layout.mine;
    parts_.at(part.slot).push_back(
        {ops::SlotLayout::run(part.begin, part.numel), regions_->place_of(part),
         ops::SlotLayout::run(part.chunk * layout.numel + part.place, part.numel), mine});
    if (!mine) return;
    const int64_t first = slots_[part.slot].layout.offset + part.begin - spec_.first;
    Mine& kept = mine_[part.slot];
    kept.in_shard = ops::SlotLayout::run(first, part.numel);
    kept.in_chunk = ops::SlotLayout::run(part.place, part.numel);
    for (int64_t begin = 0; begin < part.numel; begin += ops::kSquareBlock) {
      const int64_t numel = std::min(ops::kSquareBlock, part.numel - begin);
      const auto in_shard = ops::SlotLayout::run(first + begin, numel);
      kept.blocks.push_back({ops::view_of(gradients_.shard, in_shard, dtype()),
                             ops::SlotLayout::run(part.place + begin, numel)});
    }
  }

  std::vector<ops::Item> items_of(const std::vector<size_t>& slots) const {
    std::vector<ops::Item> items;
    for (const size_t i : slots) {
      for (const Block& block : mine_[i].blocks) items.push_back({block.elements, &block.in_chunk});
    }
    return items;
  }

  // Before a gradient is taken, which changes the averages: now, or when it arrives.
  void prepare(size_t index) {
    gradients_.squares.forget(spec_.members[index]);
    places_[index].faced = slots_[index].is_spread();
    if (!places_[index].faced && regions_->leaves_own()) let_go(index);
  }

  // A gradient in its slot's order; undefined where there is none.
  at::Tensor in_order(const Slot& slot) const {
    const at::Tensor& grad = slot.grad();
    if (!grad.defined()) return {};
    check_gradient(slot, grad);
    if (ops::in_slot_order(grad, slot.layout)) return grad;
    const at::NoGradGuard no_grad;
    const at::Tensor ordered = ops::make_strided(slot.layout.sizes, slot.layout.strides,
                                                 grad.scalar_type(), grad.device());
    return ordered.copy_(grad);
  }

  // This rank's own part of its gradients goes to the shard at once; if averages are added to
  // earlier ones, only when they arrive.
  void take_parts(const std::vector<size_t>& indices, const Packing& how) {
    std::vector<ops::Item> sent;
    std::vector<ops::Item> fresh;
    std::vector<ops::Item> own;
    for (const size_t i : indices) {
      prepare(i);
      const at::Tensor grad = in_order(slots_[i]);
      for (const Part& part : parts_[i]) {
        at::Tensor elements;
        if (grad.defined()) elements = ops::view_of(grad, part.in_gradient, grad.scalar_type());
        if (!part.mine || !regions_->leaves_own()) {
          sent.push_back({elements, &part.in_sent});
        } else if (places_[i].faced) {
          own.push_back({elements, &mine_[i].in_chunk});
        } else {
          fresh.push_back({elements, &mine_[i].in_shard});
        }
      }
    }
    regions_->take(sent, how);
    if (!fresh.empty()) ops::pack(fresh, gradients_.shard, how.scale);
    if (own.empty()) return;
    if (!own_.defined()) own_ = ops::make_scratch({spec_.layout.numel}, dtype(), device());
    ops::pack(own, own_, how.scale);
  }

  std::vector<float> flags_to_send(const Packing& how) const {
    std::vector<float> flags;
    for (const Slot& slot : slots_) flags.push_back(used_flag(slot));
    flags.push_back(how.vote ? 1.0F : 0.0F);
    for (const Place& place : places_) flags.push_back(place.faced ? 1.0F : 0.0F);
    return flags;
  }

  // Each rank keeps only its region of the earlier averages: all ranks have to add to them, or
  // none.
  void check_alike() const {
    const at::Tensor flags = flags_.to(at::kFloat);
    const auto ranks = static_cast<float>(spec_.layout.chunks);
    const float* faced = flags.const_data_ptr<float>() + slots_.size() + 1;
    for (size_t i = 0; i < slots_.size(); ++i) {
      FS_CHECK(faced[i] == 0.0F || faced[i] == ranks, "parameter '", slots_[i].param->name,
               "': ", faced[i], " of ", ranks,
               " ranks had a gradient of an earlier backward, the others had none. With zero, "
               "gradients are zeroed on every rank or on none");
    }
  }

  // Drops a packed gradient. One that this rank did not use may have to stay.
  void give_up(size_t index) {
    at::Tensor& grad = slots_[index].mutable_grad();
    if (!slots_[index].param->used) places_[index].kept = grad;
    grad = at::Tensor();
  }

  // Keeps the values of a gradient that is about to be overwritten, if its proxy is still
  // referenced.
  void let_go(size_t index) {
    const size_t member = spec_.members[index];
    if (gradients_.is_held(member)) gradients_.release(member);
  }

  // Prepares for averages that replace the earlier ones.
  void make_fresh(size_t index) {
    if (!regions_->leaves_own()) let_go(index);
    pending(index) = at::Tensor();
  }

  // Sums slots over ranks. See [Note: squares].
  void add_up(const std::vector<size_t>& slots, bool accumulate, Squares& squares) const {
    if (!gradients_.squares.wanted() || !device().is_cpu()) {
      return regions_->sum(items_of(slots), accumulate);
    }
    const size_t most = regions_->works_on_parts()
                            ? kBatch * static_cast<size_t>(at::get_num_threads())
                            : std::numeric_limits<size_t>::max();
    Batch batch;
    int64_t elements = 0;
    for (const size_t i : slots) {
      squares.members.push_back(spec_.members[i]);
      squares.sums.push_back(0.0);
      for (const Block& block : mine_[i].blocks) {
        batch.items.push_back({block.elements, &block.in_chunk});
        batch.entries.push_back(squares.sums.size() - 1);
        elements += block.in_chunk.numel;
        if (static_cast<size_t>(elements) < most) continue;
        add_up_batch(std::exchange(batch, Batch{}), accumulate, squares);
        elements = 0;
      }
    }
    add_up_batch(batch, accumulate, squares);
  }

  void add_up_batch(const Batch& batch, bool accumulate, Squares& squares) const {
    regions_->sum(batch.items, accumulate);
    std::vector<at::Tensor> tensors;
    for (const ops::Item& item : batch.items) tensors.push_back(item.tensor);
    const std::vector<double> sums = ops::square_sums(tensors);
    for (size_t i = 0; i < sums.size(); ++i) squares.sums[batch.entries[i]] += sums[i];
  }

  void bump_version(const Squares& squares) const {
    auto* const impl = gradients_.shard.unsafeGetTensorImpl();
    const uint32_t before = impl->version_counter().current_version();
    impl->bump_version();
    gradients_.squares.take(gradients_.shard, before, squares.members, squares.sums);
  }

  void end(bool in_flight) {
    regions_->end(in_flight);
    own_ = at::Tensor();
    kept_.clear();
  }

  // Returns the slot's residual in the memory order of the parameter.
  at::Tensor residual_in(const at::Tensor& flat, size_t index) const {
    ops::SlotLayout whole = slots_[index].layout;
    whole.offset = 0;
    const at::Tensor memory = ops::make_scratch({whole.numel}, at::kFloat, device());
    std::vector<ops::Item> items;
    for (const Part& part : parts_[index]) {
      items.push_back({ops::view_of(memory, part.in_gradient, at::kFloat), &part.in_residual});
    }
    if (!items.empty()) ops::unpack(items, flat, 1.0, false);
    return ops::view_of(memory, whole, at::kFloat);
  }

  // Undefined: zeros.
  void set_residual(const at::Tensor& flat, size_t index, const at::Tensor& residual) const {
    at::Tensor memory;
    if (residual.defined()) {
      ops::SlotLayout whole = slots_[index].layout;
      whole.offset = 0;
      memory = ops::make_scratch({whole.numel}, at::kFloat, device());
      ops::pack({{residual, &whole}}, memory, 1.0);
    }
    std::vector<ops::Item> items;
    for (const Part& part : parts_[index]) {
      at::Tensor elements;
      if (memory.defined()) elements = ops::view_of(memory, part.in_gradient, at::kFloat);
      items.push_back({elements, &part.in_residual});
    }
    if (!items.empty()) ops::pack(items, flat, 1.0);
  }

  // Keeps residuals, as pipelined.cpp does: the average of a gradient that no rank used is not
  // delivered.
  void keep_residuals() {
    const at::Tensor flat = regions_->residual();
    kept_.assign(slots_.size(), at::Tensor());
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (!slots_[i].param->used) kept_[i] = residual_in(flat, i);
    }
  }

  void put_back_residuals(const std::vector<bool>& used) {
    const at::Tensor flat = regions_->residual();
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (!used[i] && kept_[i].defined()) set_residual(flat, i, kept_[i]);
    }
    regions_->load_residual(flat);
  }

  ScatterSpec spec_;
  ShardedGradients& gradients_;
  Slots& slots_;
  std::unique_ptr<Regions> regions_;
  std::vector<std::vector<Part>> parts_;  // by slot
  std::vector<Mine> mine_;                // by slot; undefined where there is nothing
  std::vector<Place> places_;             // by slot
  std::vector<at::Tensor> kept_;          // residuals of unused parameters, before the step
  at::Tensor own_;                        // to add to averages, in chunk order
  at::Tensor flags_;
};

}  // namespace

std::unique_ptr<Transport> make_scattered(const ScatterSpec& spec, Slots& slots,
                                          std::unique_ptr<Regions> regions) {
  return std::make_unique<Scattered>(spec, slots, std::move(regions));
}

// -- gradients of a unit --

namespace {

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

bool is_plain(const at::Tensor& grad) {
  const bool known = grad.layout() == at::kStrided || grad.layout() == at::kSparse;
  return grad.is_cpu() && known && !grad.key_set().has(c10::DispatchKey::Python);
}

struct Member {
  const ShardedGradients* unit = nullptr;
  size_t index = 0;
};

std::unordered_map<const at::TensorImpl*, Member> members_by_proxy(const ShardedUnits& units) {
  std::unordered_map<const at::TensorImpl*, Member> members;
  for (const auto& unit : units) {
    for (size_t i = 0; i < unit->proxies.size(); ++i) {
      members[unit->proxies[i].unsafeGetTensorImpl()] = {unit.get(), i};
    }
  }
  return members;
}

// The sum of squares of plain gradients: of those of a transport together, of the others one by
// one.
double sum_squares(const std::vector<at::Tensor>& gradients,
                   const std::vector<HeldGradients>& held) {
  std::unordered_set<const at::TensorImpl*> left;
  for (const at::Tensor& gradient : gradients) left.insert(gradient.unsafeGetTensorImpl());
  double total = 0.0;
  for (const HeldGradients& bucket : held) {
    const auto asked = [&](const at::Tensor& gradient) {
      return left.count(gradient.unsafeGetTensorImpl()) > 0;
    };
    if (!std::all_of(bucket.gradients.begin(), bucket.gradients.end(), asked)) continue;
    for (const at::Tensor& gradient : bucket.gradients) left.erase(gradient.unsafeGetTensorImpl());
    total += bucket.transport->square_sum();
  }
  std::vector<at::Tensor> alone;
  for (const at::Tensor& gradient : gradients) {
    if (left.count(gradient.unsafeGetTensorImpl()) > 0) alone.push_back(gradient);
  }
  for (const double sum : ops::square_sums(alone)) total += sum;
  return total;
}

bool is_wide(const at::Tensor& tensor) {
  return c10::toRealValueType(tensor.scalar_type()) == at::kDouble;
}

}  // namespace

void SquareSums::forget(size_t member) {
  if (member < sums_.size()) sums_[member].reset();
}

void SquareSums::take(const at::Tensor& shard, uint32_t before, const std::vector<size_t>& members,
                      const std::vector<double>& sums) {
  if (before != version_) sums_.clear();
  version_ = version_of(shard);
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i] >= sums_.size()) sums_.resize(members[i] + 1);
    sums_[members[i]] = sums[i];
  }
}

std::optional<double> SquareSums::of(const at::Tensor& shard, size_t member) const {
  if (member >= sums_.size() || version_of(shard) != version_) return {};
  return sums_[member];
}

void ShardedGradients::announce(size_t member, const at::Tensor& grad) {
  announced.at(member).reset();
  if (grad.defined()) announced[member].emplace(grad.getIntrusivePtr());
}

void ShardedGradients::add(size_t member, const at::Tensor& grad) {
  const at::NoGradGuard no_grad;
  const auto expected = std::exchange(announced.at(member), std::nullopt);
  at::Tensor& mine = pending.at(member);
  if (mine.defined()) {
    mine.add_(grad);
    return;
  }
  const at::Tensor& param = params[member];
  const bool fits = grad.layout() == at::kStrided && grad.strides() == param.strides();
  const bool ours = expected && expected->lock().get() == grad.unsafeGetTensorImpl();
  if (ours && fits) {
    mine = grad.detach();
  } else {
    const auto strides = param.strides();
    mine = ops::make_strided(param.sizes(), strides, param.scalar_type(), param.device());
    mine.copy_(grad);
  }
}

std::optional<GradientSquares> known_squares(const std::vector<at::Tensor>& params,
                                             const ShardedUnits& units,
                                             const std::vector<HeldGradients>& held) {
  const auto members = members_by_proxy(units);
  GradientSquares result;
  size_t proxies = 0;
  for (const at::Tensor& param : params) {
    const at::Tensor& grad = param.grad();
    if (!grad.defined()) continue;
    result.wide = result.wide || is_wide(grad);
    const auto found = members.find(grad.unsafeGetTensorImpl());
    if (found == members.end()) {
      if (!is_plain(grad)) return {};
      result.tensors.push_back(grad);
      continue;
    }
    const auto [unit, index] = found->second;
    const std::optional<double> sum = unit->squares.of(unit->shard, index);
    if (!sum || unit->pending[index].defined()) return {};
    result.owned += *sum;
    ++proxies;
  }
  result.common = sum_squares(result.tensors, held);
  result.spread = proxies > 0;
  result.all_spread = proxies == members.size();
  return result;
}

}  // namespace fastsync::engine
