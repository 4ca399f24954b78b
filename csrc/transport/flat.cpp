#include "flat.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "../check.h"
#include "../kernels/sum.h"
#include "../ops/buffers.h"
#include "../ops/checks.h"
#include "../ops/ops.h"
#include "coding.h"

namespace fastsync::engine {
namespace {

// One element in so many is compared: see [Note: squares of the buffer].
constexpr int64_t kProbe = 1024;

}  // namespace

void GradientBuffer::renew(at::Tensor memory) {
  drop();
  memory_ = flat_ = std::move(memory);
  if (!memory_.is_cpu()) return;
  const auto whole = ops::SlotLayout::run(0, memory_.numel());
  flat_ = ops::view_of(memory_, whole, memory_.scalar_type(), ops::part_of(memory_, whole));
}

void GradientBuffer::drop() {
  memory_ = flat_ = at::Tensor();
  std::fill(parts_.begin(), parts_.end(), c10::Storage());
}

bool GradientBuffer::has_parts() const {
  return flat_.device().is_cpu() && flat_.storage().data() == memory_.storage().data();
}

bool GradientBuffer::in_memory(size_t slot) const {
  return parts_[slot] && ops::is_part_of(parts_[slot], flat_, slots_[slot].layout);
}

at::Tensor GradientBuffer::view(size_t slot) {
  const ops::SlotLayout& layout = slots_[slot].layout;
  const at::ScalarType dtype = slots_[slot].param->dtype();
  if (!has_parts()) return ops::view_of(flat_, layout, dtype);
  if (!in_memory(slot)) parts_[slot] = ops::part_of(memory_, layout);
  return ops::view_of(flat_, layout, dtype, parts_[slot]);
}

bool GradientBuffer::in_place(size_t slot) const {
  if (!flat_.defined() || (has_parts() && !in_memory(slot))) return false;
  const c10::Storage part = has_parts() ? parts_[slot] : c10::Storage();
  return ops::is_view_of(slots_[slot].grad(), flat_, slots_[slot].layout, part);
}

bool GradientBuffer::moved_out(size_t slot) const {
  const at::Tensor& grad = slots_[slot].grad();
  return parts_[slot] && grad.defined() && grad.has_storage() &&
         grad.storage().unsafeGetStorageImpl() == parts_[slot].unsafeGetStorageImpl() &&
         !in_memory(slot);
}

bool GradientBuffer::held_by_others(size_t references) const {
  size_t in_place_without_part = 0;
  size_t parts = 0;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const size_t own = in_place(i) ? 1 : 0;
    if (!has_parts()) {
      in_place_without_part += own;
    } else if (in_memory(i)) {
      if (parts_[i].use_count() != 1 + own) return true;
      ++parts;
    }
  }
  if (flat_.storage().use_count() != references + in_place_without_part) return true;
  // Ours, the flat buffer's, and the parts'.
  return flat_.device().is_cpu() && memory_.storage().use_count() != 2 + parts;
}

Flat::Flat(const FlatSpec& spec, Slots& slots)
    : spec_(spec), slots_(slots), places_(slots.size()), buffer_(slots) {
  if (spec_.flags_offset >= 0) {
    const auto count = static_cast<int64_t>(slots_.size());
    for (int64_t i = 0; i <= count; ++i) {
      flag_layouts_.push_back(ops::SlotLayout::run(spec_.flags_offset + i, 1));
    }
    flag_layouts_.push_back(ops::SlotLayout::run(spec_.flags_offset, count));
  }
  gradients_layout_ =
      ops::SlotLayout::run(0, spec_.flags_offset >= 0 ? spec_.flags_offset : spec_.numel);
}

int64_t Flat::bytes() const {
  return spec_.numel * static_cast<int64_t>(c10::elementSize(spec_.dtype));
}

void Flat::check_kind(const Slot& slot) const {
  FS_CHECK(!spec_.views || c10::toRealValueType(slot.param->dtype()) == spec_.dtype, "parameter '",
           slot.param->name, "' is ", slot.grad().scalar_type(), " but was ", spec_.dtype,
           " when the model was wrapped; convert the model first, then wrap it");
}

void Flat::take(size_t index, const Packing& how) {
  Slot& slot = slots_[index];
  const auto bytes = slot.layout.numel * static_cast<int64_t>(c10::elementSize(spec_.dtype));
  if (bytes < kEarlyBytes || !device().is_cpu()) return;
  check_gradient(slot, slot.grad());
  check_kind(slot);
  ensure_flat();
  ops::pack({{slot.grad(), &slot.layout}}, flat(), how.scale);
  slot.early = true;
  places_[index].in_place = spec_.views;
  install_view(index);
}

void Flat::pack(const Packing& how) {
  missed_ = how.missed;
  ensure_flat();
  find_in_place();
  keep_unused();
  std::vector<ops::Item> all = items();
  append_flags(all, how);
  ops::pack(all, flat(), how.scale);
  if (!flag_layouts_.empty()) add_to_first(flags(), how.infinities);
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].param->used && !places_[i].in_place) install_view(i);
  }
}

void Flat::find_in_place() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    places_[i].in_place = spec_.views && buffer_.in_place(i);
  }
}

// See [Note: gradients live in the bucket].
void Flat::ensure_flat() {
  if (std::exchange(flat_is_ours_, true)) return;
  if (flat().defined() && !(spec_.views && buffer_.held_by_others(references()))) return;
  buffer_.renew(make_memory());
  new_buffer();
}

// Packing scales in-place gradients, and the sum of the parts may differ from the whole in the last
// bit. A parameter that no rank used must keep its gradient exactly.
void Flat::keep_unused() {
  if (!missed_) return;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (!slots_[i].param->used && places_[i].in_place)
      places_[i].kept = ops::copy_of(slots_[i].grad());
  }
}

// Returns the items to pack; one for all if all gradients are in place.
std::vector<ops::Item> Flat::items() const {
  bool all_in_place = true;
  for (size_t i = 0; i < slots_.size(); ++i) {
    all_in_place = all_in_place && places_[i].in_place && !slots_[i].early;
  }
  if (all_in_place) {
    return {{ops::view_of(flat(), gradients_layout_, spec_.dtype), &gradients_layout_}};
  }
  for (const Slot& slot : slots_) {
    if (!slot.early && slot.grad().defined()) check_kind(slot);
  }
  return gradient_items(slots_);
}

// See [Note: used flags].
void Flat::append_flags(std::vector<ops::Item>& items, const Packing& how) const {
  if (flag_layouts_.empty()) return;
  const size_t count = slots_.size();
  if (!how.missed && !how.check_finite) {
    items.push_back({at::Tensor(), &flag_layouts_[count + 1], 1.0F});
  } else {
    for (size_t i = 0; i < count; ++i) {
      items.push_back({at::Tensor(), &flag_layouts_[i], used_flag(slots_[i])});
    }
  }
  items.push_back({at::Tensor(), &flag_layouts_[count], how.vote ? 1.0F : 0.0F});
}

void Flat::install_view(size_t index) {
  at::Tensor& grad = slots_[index].param->tensor.mutable_grad();
  if (!spec_.views || !grad.defined() || buffer_.moved_out(index)) return;
  grad = buffer_.view(index);
}

// The averages are read on this stream, and the user may drop the last reference to them. Their
// memory returns to the stream that it was allocated on, and must not be reused there while this
// stream still reads it.
void Flat::receive(const at::Tensor& /*result*/) { ops::record_here(flat()); }

void Flat::deliver(const std::vector<bool>& used) {
  if (spec_.views) {
    deliver_moved_out(used);
    deliver_views(used);
  } else {
    ops::unpack(delivery_items(slots_, used, {}), flat(), 1.0, false);
  }
}

// See [Note: a storage for each gradient].
void Flat::deliver_moved_out(const std::vector<bool>& used) {
  std::vector<ops::Item> items;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (used[i] && buffer_.moved_out(i)) items.push_back({slots_[i].grad(), &slots_[i].layout});
  }
  if (!items.empty()) ops::unpack(items, flat(), 1.0, false);
}

void Flat::deliver_views(const std::vector<bool>& used) {
  if (!missed_) return;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (slot.param->used) continue;
    at::Tensor& grad = slot.param->tensor.mutable_grad();
    if (used[i] && !places_[i].in_place && !buffer_.moved_out(i)) {
      grad = buffer_.view(i);
    } else if (!used[i] && places_[i].kept.defined()) {
      grad.copy_(places_[i].kept);
    }
  }
}

void Flat::abandon(bool in_flight) {
  if (in_flight) {
    buffer_.drop();
    new_buffer();
  }
  flat_is_ours_ = missed_ = false;
  for (Place& place : places_) place = Place{};
}

bool Flat::holds_gradients() const {
  if (!spec_.views || !device().is_cpu() || !flat().defined()) return false;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (!buffer_.in_place(i)) return false;
  }
  return true;
}

double Flat::square_sum() const {
  const int64_t each = kernels::kSumChunk / static_cast<int64_t>(c10::elementSize(spec_.dtype));
  std::vector<at::Tensor> chunks;
  for (int64_t begin = 0; begin < gradients_numel(); begin += each) {
    chunks.push_back(ops::run_of(flat(), begin, std::min(each, gradients_numel() - begin)));
  }
  double total = 0.0;
  for (const double sum : ops::square_sums(chunks)) total += sum;
  return total;
}

at::Tensor Flat::make_memory() const { return ops::make_flat(spec_.numel, spec_.dtype, device()); }

Shadow Flat::shadow(uint64_t /*step*/) {
  const at::Tensor flat = make_memory();
  auto in_flight = start(flat);
  return Shadow{std::move(in_flight), [vote = vote_in(flat)] { return vote; }};
}

at::Tensor Flat::flags() const {
  return flat().narrow(0, spec_.flags_offset, static_cast<int64_t>(slots_.size()));
}

at::Tensor Flat::vote_in(const at::Tensor& flat) const {
  if (flag_layouts_.empty() || !flat.defined()) return {};
  return ops::view_of(flat, flag_layouts_[slots_.size()], spec_.dtype);
}

namespace {

class AllReduce final : public Flat {
 public:
  AllReduce(const FlatSpec& spec, Slots& slots, std::shared_ptr<comm::Collective> ranks)
      : Flat(spec, slots), ranks_(std::move(ranks)) {}

  void begin() override { counted_.reset(); }

  void pack(const Packing& how) override {
    Flat::pack(how);
    squaring_ = how.squares && spec().views;
    if (squaring_ && !squares_.defined()) squares_ = ranks_->make_squares(flat());
  }

  std::unique_ptr<comm::InFlight> launch() override {
    if (!squaring_ || !squares_.defined()) return start(flat());
    return ranks_->all_reduce_and_square(flat(), squares_, gradients_numel());
  }

  void deliver(const std::vector<bool>& used) override {
    Flat::deliver(used);
    if (squaring_ && squares_.defined() && !missed() && holds_gradients()) count();
  }

  double square_sum() const override {
    const bool known = counted_ && counted_->versions == versions() && counted_->probes == probes();
    return known ? counted_->sum : Flat::square_sum();
  }

  void abandon(bool in_flight) override {
    Flat::abandon(in_flight);
    if (in_flight) squares_ = at::Tensor();  // collectives may still write to it
  }

  // The bytes of a ring, if the backend chooses the algorithm.
  int64_t sent_bytes() const override {
    return ranks_->leaving(2 * bytes() * (ranks_->size() - 1) / ranks_->size());
  }

 private:
  struct Counted {
    double sum = 0.0;
    std::vector<uint32_t> versions;  // by slot
    std::vector<char> probes;
  };

  std::unique_ptr<comm::InFlight> start(const at::Tensor& flat) override {
    return ranks_->all_reduce(flat);
  }
  at::Tensor make_memory() const override {
    return ranks_->make_flat(spec().numel, spec().dtype, device());
  }

  void count() {
    counted_ = Counted{0.0, versions(), probes()};
    const auto* const sums = squares_.const_data_ptr<double>();
    for (int64_t i = 0; i < squares_.numel(); ++i) counted_->sum += sums[i];
  }

  std::vector<uint32_t> versions() const {
    std::vector<uint32_t> all;
    for (const Slot& slot : slots()) {
      all.push_back(slot.grad().unsafeGetTensorImpl()->version_counter().current_version());
    }
    return all;
  }

  std::vector<char> probes() const {
    const auto bytes = static_cast<int64_t>(c10::elementSize(spec().dtype));
    const auto* const data = static_cast<const char*>(flat().const_data_ptr());
    std::vector<char> all;
    all.reserve(static_cast<size_t>((gradients_numel() / kProbe + 1) * bytes));
    for (int64_t i = 0; i < gradients_numel(); i += kProbe) {
      all.insert(all.end(), data + i * bytes, data + (i + 1) * bytes);
    }
    return all;
  }

  std::shared_ptr<comm::Collective> ranks_;
  at::Tensor squares_;  // in the memory of `ranks_`; undefined if these do not sum squares up
  bool squaring_ = false;
  std::optional<Counted> counted_;
};

}  // namespace

std::unique_ptr<Flat> make_all_reduce(const FlatSpec& spec, Slots& slots,
                                      std::shared_ptr<comm::Collective> ranks) {
  return std::make_unique<AllReduce>(spec, slots, std::move(ranks));
}

}  // namespace fastsync::engine
