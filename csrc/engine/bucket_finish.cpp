// The second half of a bucket's step: from the received averages to the parameters' gradients.
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cmath>
#include <utility>

#include "../check.h"
#include "bucket.h"

namespace fastsync::engine {

void Bucket::receive() {
  move_to(BucketState::kInFlight, BucketState::kReceived);
  const at::Tensor result = in_flight_->wait();
  in_flight_.reset();
  lend_to_current_stream();
  if (!result.defined() || result.const_data_ptr() == flat_.const_data_ptr()) return;
  const at::Tensor& like = slots_.front().param->tensor;
  FS_CHECK(result.numel() == hook_layout_.sizes[0], "the communication hook returned ",
           result.numel(), " elements for a bucket of ", hook_layout_.sizes[0]);
  const at::Tensor reduced = result.detach().to(like.device(), like.scalar_type()).view({-1});
  ops::pack({{reduced, &hook_layout_}}, flat_, 1.0);
}

// The averages are read on this stream, and the user may be the last to let go of them. Their memory, which goes back to the
// stream that it was allocated on, must not be handed out there while it is still read here.
void Bucket::lend_to_current_stream() const {
  if (!home_ || !flat_.defined() || !flat_.has_storage()) return;
  const c10::impl::VirtualGuardImpl guard(device().type());
  const c10::Stream current = guard.getStream(device());
  if (current != *home_) guard.recordDataPtrOnStream(flat_.storage().data_ptr(), current);
}

void Bucket::finish(const std::vector<bool>& used_anywhere) {
  move_to(BucketState::kReceived, BucketState::kFilling);
  if (flat_.is_sparse()) {
    finish_sparse();
  } else if (spec_.views) {
    finish_views(globally_used(used_anywhere));
  } else {
    finish_copies(globally_used(used_anywhere));
  }
  abandon();
}

void Bucket::finish_sparse() {
  const at::Tensor sum = std::exchange(flat_, at::Tensor());
  const Parameter& param = *slots_.front().param;
  if (param.used || sum._nnz() > 0) param.tensor.mutable_grad() = sum;
}

std::vector<bool> Bucket::globally_used(const std::vector<bool>& used_anywhere) const {
  std::vector<bool> used(slots_.size(), true);
  if (!used_anywhere.empty()) {
    for (size_t i = 0; i < slots_.size(); ++i) {
      used[i] = used_anywhere.at(static_cast<size_t>(spec_.slots[i].param));
    }
    return used;
  }
  if (!missed_) return used;
  if (!has_flags()) {
    for (size_t i = 0; i < slots_.size(); ++i) used[i] = slots_[i].param->used;
    return used;
  }
  const at::Tensor flags = flags_on_host();
  const float* values = flags.const_data_ptr<float>();
  for (size_t i = 0; i < slots_.size(); ++i) used[i] = slots_[i].param->used || values[i] > 0.0F;
  return used;
}

bool Bucket::has_flags() const { return wire_ ? wire_->has_flags() : !flag_layouts_.empty(); }

at::Tensor Bucket::flags_on_host() const {
  if (wire_) return wire_->flags().to(at::kCPU);
  return flat_.narrow(0, spec_.flags_offset, static_cast<int64_t>(slots_.size()))
      .to(at::TensorOptions().device(at::kCPU).dtype(at::kFloat));
}

void Bucket::count_uses(std::vector<int64_t>& counts) const {
  if (!has_flags() || (!wire_ && (!flat_.defined() || flat_.is_sparse()))) return;
  const at::Tensor flags = flags_on_host();
  const float* values = flags.const_data_ptr<float>();
  for (size_t i = 0; i < slots_.size(); ++i) {
    counts.at(static_cast<size_t>(spec_.slots[i].param)) = std::lround(values[i]);
  }
}

void Bucket::finish_views(const std::vector<bool>& used) {
  if (!missed_) return;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.param->used) continue;
    at::Tensor& grad = slot.param->tensor.mutable_grad();
    if (used[i] && !slot.in_place) {
      grad = ops::view_of(flat_, slot.layout, slot.param->dtype());
    } else if (!used[i] && slot.kept.defined()) {
      grad.copy_(slot.kept);
    }
  }
}

void Bucket::finish_copies(const std::vector<bool>& used) {
  std::vector<ops::Item> items;
  items.reserve(slots_.size());
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (!used[i]) continue;
    const Slot& slot = slots_[i];
    at::Tensor& grad = slot.param->tensor.mutable_grad();
    if (grad.defined() && slot.delivered == grad.unsafeGetTensorImpl()) continue;
    if (!grad.defined() || grad.scalar_type() != slot.param->dtype()) {
      grad =
          ops::make_strided(slot.layout.sizes, slot.layout.strides, slot.param->dtype(), device());
    }
    items.push_back({grad, &slot.layout});
  }
  if (wire_) {
    wire_->unpack(items);
  } else {
    ops::unpack(items, flat_, 1.0, false);
  }
}

}  // namespace fastsync::engine
