#include "gradient_buffer.h"

#include <algorithm>
#include <utility>

#include "../ops/ops.h"

namespace fastsync::engine {

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

}  // namespace fastsync::engine
