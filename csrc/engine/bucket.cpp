#include "bucket.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "../check.h"

namespace fastsync::engine {
namespace {

// Bytes from which a gradient is packed when it arrives: more than a core's own cache holds besides.
constexpr int64_t kEarlyBytes = 512 << 10;

// No rows of a sparse gradient: indices along the first dimension, dense behind it, as embeddings have them. Backends
// exchange indices and values as they are, so all ranks must have them in one form.
at::Tensor empty_rows(const Parameter& param) {
  std::vector<int64_t> row = param.tensor.sizes().vec();
  row.front() = 0;
  const at::Device device = param.tensor.device();
  const at::Tensor indices = ops::make_scratch({1, 0}, at::kLong, device);
  const at::Tensor values = ops::make_scratch(row, param.dtype(), device);
  return at::_sparse_coo_tensor_unsafe(indices, values, param.tensor.sizes())._coalesced_(true);
}

}  // namespace

const char* to_string(BucketState state) {
  switch (state) {
    case BucketState::kFilling:
      return "filling";
    case BucketState::kReady:
      return "ready";
    case BucketState::kPacked:
      return "packed";
    case BucketState::kInFlight:
      return "in flight";
    case BucketState::kReceived:
      return "received";
  }
  return "unknown";
}

Bucket::Bucket(BucketSpec spec, const std::vector<std::unique_ptr<Parameter>>& params)
    : spec_(std::move(spec)), pending_(spec_.slots.size()) {
  FS_CHECK_VALUE(!spec_.slots.empty(), "a bucket needs at least one parameter");
  FS_CHECK_VALUE(!spec_.sparse || spec_.slots.size() == 1, "a sparse bucket holds one parameter");
  for (const SlotSpec& slot_spec : spec_.slots) {
    Parameter* param = params.at(static_cast<size_t>(slot_spec.param)).get();
    Slot slot;
    slot.param = param;
    slot.layout = ops::SlotLayout::of(param->tensor, slot_spec.offset);
    slots_.push_back(std::move(slot));
  }
  if (spec_.flags_offset >= 0) {
    const auto count = static_cast<int64_t>(slots_.size());
    for (int64_t i = 0; i <= count; ++i) {
      flag_layouts_.push_back(ops::SlotLayout::run(spec_.flags_offset + i, 1));
    }
    flag_layouts_.push_back(ops::SlotLayout::run(spec_.flags_offset, count));
  }
  gradients_layout_ =
      ops::SlotLayout::run(0, spec_.flags_offset >= 0 ? spec_.flags_offset : spec_.numel);
  hook_layout_ = gradients_layout_;
  if (slots_.front().param->tensor.is_complex()) hook_layout_.sizes = {hook_layout_.numel / 2};
}

int64_t Bucket::wire_bytes() const {
  if (wire_) return wire_->bytes();
  return spec_.numel * static_cast<int64_t>(c10::elementSize(spec_.wire));
}

int64_t Bucket::gradient_bytes() const {
  int64_t bytes = 0;
  for (const Slot& slot : slots_) {
    const at::ScalarType real = c10::toRealValueType(slot.param->dtype());
    bytes += slot.layout.numel * static_cast<int64_t>(c10::elementSize(real));
  }
  return bytes;
}

int64_t Bucket::sent_bytes(int ranks) const {
  return wire_ ? wire_->sent_bytes() : 2 * wire_bytes() * (ranks - 1) / ranks;
}

std::string Bucket::describe() const {
  const double mib = static_cast<double>(wire_bytes()) / (1 << 20);
  const double rounded = static_cast<double>(static_cast<int64_t>(mib * 10 + 0.5)) / 10;
  const std::string& first = slots_.front().param->name;
  const std::string& last = slots_.back().param->name;
  if (slots_.size() == 1) return concat("parameter '", first, "', ", rounded, " MiB");
  return concat(slots_.size(), " parameters, '", first, "' to '", last, "', ", rounded, " MiB");
}

void Bucket::move_to(BucketState from, BucketState to) {
  FS_ASSERT(state_ == from, "bucket (", describe(), ") is ", to_string(state_), ", cannot go from ",
            to_string(from), " to ", to_string(to));
  state_ = to;
}

bool Bucket::mark_ready(size_t index, std::optional<c10::Stream> stream) {
  Slot& slot = slots_.at(index);
  slot.stream = std::move(stream);
  ++slot.fires;
  missed_ = missed_ || !slot.param->used;
  const bool repeated = slot.fires > slot.param->expected_fires;
  if (repeated) slot.param->expected_fires = slot.fires;
  slot.early = slot.early && !repeated;  // pack it again
  if (repeated || slot.fires < slot.param->expected_fires || --pending_ > 0) return false;
  move_to(BucketState::kFilling, BucketState::kReady);
  return true;
}

void Bucket::close() {
  if (state_ != BucketState::kFilling) return;
  for (const Slot& slot : slots_) missed_ = missed_ || !slot.param->used;
  pending_ = 0;
  move_to(BucketState::kFilling, BucketState::kReady);
}

void Bucket::check_gradient(const Slot& slot, const at::Tensor& grad) const {
  const at::Tensor& param = slot.param->tensor;
  FS_CHECK(grad.layout() == at::kStrided, "parameter '", slot.param->name,
           "' received a gradient with layout ", grad.layout(),
           ", but its module does not announce sparse gradients; only nn.Embedding and "
           "nn.EmbeddingBag with sparse=True are reduced as sparse tensors");
  const bool right_dtype =
      grad.scalar_type() == param.scalar_type() || grad.scalar_type() == slot.param->dtype();
  FS_CHECK(right_dtype && grad.device() == param.device() && grad.sizes() == param.sizes(),
           "the gradient of parameter '", slot.param->name, "' is ", grad.scalar_type(), " ",
           grad.sizes(), " on ", grad.device(), ", but the parameter is ", param.scalar_type(), " ",
           param.sizes(), " on ", param.device(),
           "; was the model moved or converted after it was wrapped? Wrap it afterwards");
  FS_CHECK(!spec_.views || c10::toRealValueType(slot.param->dtype()) == spec_.wire, "parameter '",
           slot.param->name, "' is ", grad.scalar_type(), " but was ", spec_.wire,
           " when the model was wrapped; convert the model first, then wrap it");
}

// Gradients that autograd produced on another stream than the current one must be finished, and their memory must not
// be handed out again, before the pack kernel has read them.
void Bucket::wait_for_producers() const {
  if (device().is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device().type());
  const c10::Stream current = guard.getStream(device());
  std::vector<c10::Stream> seen{current};
  for (const Slot& slot : slots_) {
    if (!slot.stream || *slot.stream == current) continue;
    const at::Tensor& grad = slot.param->tensor.grad();
    if (grad.defined() && grad.has_storage()) {
      guard.recordDataPtrOnStream(grad.storage().data_ptr(), current);
    }
    if (std::find(seen.begin(), seen.end(), *slot.stream) != seen.end()) continue;
    seen.push_back(*slot.stream);
    c10::Event event(device().type());
    event.record(*slot.stream);
    event.block(current);
  }
}

void Bucket::pack(const PackOptions& options) {
  move_to(BucketState::kReady, BucketState::kPacked);
  wait_for_producers();
  const at::Tensor& first = slots_.front().param->tensor.grad();
  if (spec_.sparse && (!first.defined() || first.is_sparse())) {
    pack_sparse(options);
  } else if (wire_) {
    pack_coded(options);
  } else {
    pack_dense(options);
  }
}

// A rank without a gradient takes part with an empty one.
void Bucket::pack_sparse(const PackOptions& options) {
  const at::NoGradGuard no_grad;
  const Parameter& param = *slots_.front().param;
  const at::Tensor& grad = param.tensor.grad();
  if (grad.defined()) {
    flat_ = grad.to(param.dtype()).mul(options.scale).coalesce();
  } else {
    flat_ = empty_rows(param);
  }
}

void Bucket::pack_coded(const PackOptions& options) {
  std::vector<float> flags;
  for (const Slot& slot : slots_) flags.push_back(slot.param->used ? 1.0F : 0.0F);
  flags.push_back(options.vote ? 1.0F : 0.0F);
  wire_->pack(gradient_items(/*all_in_place=*/false), flags, {options.scale, options.step});
}

void Bucket::pack_dense(const PackOptions& options) {
  ensure_flat();
  find_in_place();
  keep_unused();
  const bool all_in_place = std::all_of(
      slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.in_place && !slot.early; });
  std::vector<ops::Item> items = gradient_items(all_in_place);
  append_flags(items, options.vote);
  ops::pack(items, flat_, options.scale);
  for (Slot& slot : slots_) {
    if (slot.param->used && !slot.in_place) install_view(slot);
  }
}

void Bucket::pack_early(size_t index, const PackOptions& options) {
  Slot& slot = slots_.at(index);
  const at::Tensor& grad = slot.param->tensor.grad();
  const auto bytes = slot.layout.numel * static_cast<int64_t>(c10::elementSize(spec_.wire));
  const bool arrived = slot.fires == slot.param->expected_fires && grad.defined();
  if (!arrived || bytes < kEarlyBytes || spec_.sparse || !device().is_cpu()) return;
  check_gradient(slot, grad);
  if (wire_) {
    slot.early = wire_->works_on_parts();
    if (slot.early) wire_->take({{grad, &slot.layout}}, {options.scale, options.step});
    return;
  }
  ensure_flat();
  ops::pack({{grad, &slot.layout}}, flat_, options.scale);
  slot.early = true;
  slot.in_place = spec_.views;
  install_view(slot);
}

void Bucket::find_in_place() {
  for (Slot& slot : slots_) {
    slot.in_place = spec_.views && ops::is_view_of(slot.param->tensor.grad(), flat_, slot.layout);
  }
}

// See [Note: gradients live in the bucket].
void Bucket::ensure_flat() {
  if (std::exchange(flat_is_ours_, true) || (flat_.defined() && !spec_.views)) return;
  find_in_place();
  const auto in_place =
      std::count_if(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.in_place; });
  if (flat_.defined() && flat_.storage().use_count() == 1 + static_cast<size_t>(in_place)) return;
  flat_ = ops::make_flat(spec_.numel, spec_.wire, device());
  if (!device().is_cpu()) {
    home_ = c10::impl::VirtualGuardImpl(device().type()).getStream(device());
  }
}

// Packing scales in-place gradients, and the sum of the parts may differ from the whole in the last bit. A parameter that
// no rank used must keep its gradient exactly.
void Bucket::keep_unused() {
  if (!missed_) return;
  const at::NoGradGuard no_grad;
  for (Slot& slot : slots_) {
    if (!slot.param->used && slot.in_place) slot.kept = ops::copy_of(slot.param->tensor.grad());
  }
}

std::vector<ops::Item> Bucket::gradient_items(bool all_in_place) {
  std::vector<ops::Item> items;
  items.reserve(slots_.size() * 2 + 2);
  if (all_in_place) {
    items.push_back({ops::view_of(flat_, gradients_layout_, spec_.wire), &gradients_layout_});
    return items;
  }
  for (const Slot& slot : slots_) {
    if (slot.early) continue;
    const at::Tensor& grad = slot.param->tensor.grad();
    if (!grad.defined()) {
      items.push_back({at::Tensor(), &slot.layout, 0.0F});
      continue;
    }
    check_gradient(slot, grad);
    items.push_back({grad, &slot.layout});
  }
  return items;
}

// See [Note: used flags].
void Bucket::append_flags(std::vector<ops::Item>& items, bool vote) {
  if (flag_layouts_.empty()) return;
  const size_t count = slots_.size();
  if (!missed_) {
    items.push_back({at::Tensor(), &flag_layouts_[count + 1], 1.0F});
  } else {
    for (size_t i = 0; i < count; ++i) {
      items.push_back({at::Tensor(), &flag_layouts_[i], slots_[i].param->used ? 1.0F : 0.0F});
    }
  }
  items.push_back({at::Tensor(), &flag_layouts_[count], vote ? 1.0F : 0.0F});
}

void Bucket::install_view(Slot& slot) {
  at::Tensor& grad = slot.param->tensor.mutable_grad();
  if (!spec_.views || !grad.defined()) return;
  grad = ops::view_of(flat_, slot.layout, slot.param->dtype());
}

void Bucket::launch(comm::Collective& collective) {
  move_to(BucketState::kPacked, BucketState::kInFlight);
  in_flight_ = collective.all_reduce(flat_);
}

void Bucket::launch(comm::Chains& chains) {
  move_to(BucketState::kPacked, BucketState::kInFlight);
  in_flight_ = wire_->launch(chains, delivery());
}

// What this rank used is certain to get an average.
Delivery Bucket::delivery() {
  Delivery delivery;
  if (!wire_->works_on_parts()) return delivery;
  for (Slot& slot : slots_) {
    const at::Tensor& grad = slot.param->tensor.grad();
    if (!slot.param->used || !grad.defined() || grad.scalar_type() != slot.param->dtype() ||
        !ops::in_slot_order(grad, slot.layout)) {
      continue;
    }
    slot.delivered = grad.unsafeGetTensorImpl();
    delivery.tensors.push_back(grad);
    delivery.layouts.push_back(slot.layout);
  }
  return delivery;
}

void Bucket::launch(comm::Hook& hook, size_t index, size_t count) {
  move_to(BucketState::kPacked, BucketState::kInFlight);
  FS_CHECK(!flat_.is_sparse(), "communication hooks cannot reduce sparse gradients");
  in_flight_ = hook.run(hook_view(flat_, index, count));
}

comm::HookBucket Bucket::hook_view(const at::Tensor& flat, size_t index, size_t count) const {
  const at::Tensor& first = slots_.front().param->tensor;
  const int64_t per_element = first.is_complex() ? 2 : 1;
  comm::HookBucket bucket{index, count, ops::view_of(flat, hook_layout_, first.scalar_type()), {}};
  for (const Slot& slot : slots_) {
    bucket.slots.push_back({static_cast<size_t>(slot.layout.offset / per_element),
                            static_cast<size_t>(slot.layout.numel / per_element), slot.layout.sizes,
                            slot.param->tensor});
  }
  return bucket;
}

void Bucket::abandon() {
  state_ = BucketState::kFilling;
  // A collective that nobody waits for still writes: it keeps that buffer for itself.
  if (std::exchange(in_flight_, nullptr)) {
    flat_ = at::Tensor();
    if (wire_) wire_->abandon();
  }
  pending_ = slots_.size();
  missed_ = false;
  flat_is_ours_ = false;
  for (Slot& slot : slots_) {
    slot.fires = 0;
    slot.in_place = false;
    slot.early = false;
    slot.delivered = nullptr;
    slot.kept = at::Tensor();
    slot.stream.reset();
  }
}

Shadow Bucket::shadow(comm::Collective& collective) const {
  const at::NoGradGuard no_grad;
  const at::Tensor flat = spec_.sparse ? empty_rows(*slots_.front().param)
                                       : ops::make_flat(spec_.numel, spec_.wire, device());
  auto in_flight = collective.all_reduce(flat);
  return Shadow{std::move(in_flight), [vote = vote_in(flat)] { return vote; }};
}

Shadow Bucket::shadow(comm::Chains& chains, uint64_t step) {
  std::vector<ops::Item> nothing;
  for (const Slot& slot : slots_) nothing.push_back({at::Tensor(), &slot.layout, 0.0F});
  wire_->pack(nothing, std::vector<float>(slots_.size() + 1, 0.0F), {1.0, step});
  return Shadow{wire_->launch(chains, {}), [this] { return vote(); }};
}

Shadow Bucket::shadow(comm::Hook& hook, size_t index, size_t count) const {
  const at::Tensor flat = ops::make_flat(spec_.numel, spec_.wire, device());
  return Shadow{hook.run(hook_view(flat, index, count)), [] { return at::Tensor(); }};
}

at::Tensor Bucket::vote() const {
  if (!wire_) return vote_in(flat_);
  return has_flags() ? wire_->flag(static_cast<int64_t>(slots_.size())) : at::Tensor();
}

at::Tensor Bucket::factor(size_t slot) const {
  const ops::SlotLayout& layout = slots_[slot].layout;
  if (!wire_ || layout.numel == 0) return {};  // its offset is that of its successor
  return wire_->factor(layout.offset);
}

void Bucket::read_carried(Carried& carried) const {
  const at::Tensor flat = has_residual() ? wire_->residual() : at::Tensor();
  for (size_t i = 0; i < slots_.size(); ++i) {
    const auto param = static_cast<size_t>(spec_.slots[i].param);
    if (flat.defined()) {
      carried.residuals.at(param) = ops::view_of(flat, slots_[i].layout, at::kFloat);
    }
    if (has_factor(i)) carried.factors.at(param) = factor(i);
  }
}

void Bucket::load_carried(const Carried& carried) {
  if (has_residual()) load_residuals(carried.residuals);
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (!has_factor(i)) continue;
    const auto param = static_cast<size_t>(spec_.slots[i].param);
    wire_->load_factor(slots_[i].layout.offset, carried.factors.at(param));
  }
}

void Bucket::load_residuals(const std::vector<at::Tensor>& residuals) {
  const at::NoGradGuard no_grad;
  const at::Tensor flat = wire_->residual();
  for (size_t i = 0; i < slots_.size(); ++i) {
    const at::Tensor mine = ops::view_of(flat, slots_[i].layout, at::kFloat);
    const at::Tensor& loaded = residuals.at(static_cast<size_t>(spec_.slots[i].param));
    if (loaded.defined()) {
      mine.copy_(loaded);
    } else {
      mine.zero_();
    }
  }
  wire_->load_residual(flat);
}

at::Tensor Bucket::vote_in(const at::Tensor& flat) const {
  if (flag_layouts_.empty() || !flat.defined() || flat.is_sparse()) return at::Tensor();
  return ops::view_of(flat, flag_layouts_[slots_.size()], spec_.wire);
}

}  // namespace fastsync::engine
