// Lists of items for a kernel to pack or unpack. Units make them anew for each call.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/strides.h>

#include <cstdint>
#include <deque>
#include <vector>

#include "ops/items.h"
#include "ops/ops.h"

namespace fastsync::engine {

// The same elements side by side, in row-major order.
inline ops::SlotLayout compact(int64_t offset, int64_t numel, at::IntArrayRef sizes) {
  return {offset, numel, at::DimVector(sizes), c10::contiguous_strides(sizes)};
}

inline at::Tensor run_of(const at::Tensor& flat, int64_t begin, int64_t numel) {
  return ops::view_of(flat, ops::SlotLayout::run(begin, numel), flat.scalar_type());
}

// Owns the layouts that its items point to.
class ItemList {
 public:
  // `tensor`, none for `fill` everywhere, and elements of a flat buffer that begin at `offset`.
  void add(const at::Tensor& tensor, int64_t offset, const ops::SlotLayout& like, float fill = 0) {
    if (like.numel == 0) return;
    layouts_.push_back(compact(offset, like.numel, like.sizes));
    items_.push_back({tensor, &layouts_.back(), fill});
  }
  void add_run(const at::Tensor& tensor, int64_t offset, int64_t numel, float fill = 0) {
    add(tensor, offset, ops::SlotLayout::run(0, numel), fill);
  }

  const std::vector<ops::Item>& items() const { return items_; }

  void pack(const at::Tensor& flat, const ops::Scale& scale) const {
    if (!items_.empty()) ops::pack(items_, flat, scale);
  }
  void unpack(const at::Tensor& flat, const ops::Scale& scale, bool accumulate) const {
    if (!items_.empty()) ops::unpack(items_, flat, scale, accumulate);
  }

 private:
  std::deque<ops::SlotLayout> layouts_;
  std::vector<ops::Item> items_;
};

}  // namespace fastsync::engine
