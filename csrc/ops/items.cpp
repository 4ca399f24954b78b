#include "items.h"

#include <c10/util/strides.h>

#include <algorithm>

#include "../check.h"
#include "buffers.h"

namespace fastsync::ops {
namespace {

using kernels::DType;
using kernels::Segment;

void check_item(const Item& item, int64_t numel, at::Device device) {
  const SlotLayout& layout = *item.layout;
  FS_CHECK_VALUE(layout.offset >= 0 && layout.offset + layout.numel <= numel, "a slot of ",
                 layout.numel, " elements at offset ", layout.offset,
                 " does not fit in a flat buffer of ", numel, " elements");
  if (!item.tensor.defined()) return;
  FS_CHECK_VALUE(item.tensor.layout() == at::kStrided, "expects dense tensors but got layout ",
                 item.tensor.layout());
  FS_CHECK_VALUE(item.tensor.sizes() == at::IntArrayRef(layout.sizes), "expects a tensor of sizes ",
                 at::IntArrayRef(layout.sizes), " but got ", item.tensor.sizes());
  FS_CHECK_VALUE(item.tensor.device() == device, "expects a tensor on ", device, " but got one on ",
                 item.tensor.device());
}

}  // namespace

SlotLayout SlotLayout::of(const at::Tensor& like, int64_t offset) {
  SlotLayout layout;
  layout.offset = offset;
  layout.numel = like.numel() * (like.is_complex() ? 2 : 1);
  layout.sizes = at::DimVector(like.sizes());
  layout.strides = at::DimVector(like.strides());
  if (!like.is_non_overlapping_and_dense()) {
    layout.strides = c10::contiguous_strides(like.sizes());
  }
  return layout;
}

SlotLayout SlotLayout::run(int64_t offset, int64_t numel) {
  return SlotLayout{offset, numel, {numel}, {1}};
}

// The stride of a dimension of size 1 means nothing, and autograd may hand over gradients that are
// only marked as conjugated or negated.
bool in_slot_order(const at::Tensor& tensor, const SlotLayout& layout) {
  if (tensor.is_conj() || tensor.is_neg()) return false;
  if (tensor.numel() <= 1) return true;
  for (size_t d = 0; d < layout.sizes.size(); ++d) {
    const auto dim = static_cast<int64_t>(d);
    if (layout.sizes[d] != 1 && tensor.stride(dim) != layout.strides[d]) return false;
  }
  return true;
}

DType kernel_dtype(at::ScalarType dtype) {
  switch (c10::toRealValueType(dtype)) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kDouble:
      return DType::kFloat64;
    default:
      break;
  }
  throw std::invalid_argument(concat(
      "fastsync: cannot pack tensors of dtype ", c10::toString(dtype),
      "; supported are float32, float16, bfloat16, float64 and complex numbers made of those"));
}

SegmentTable::SegmentTable(const std::vector<Item>& items, Way way, int64_t numel,
                           at::Device device, at::ScalarType dtype) {
  std::vector<Segment> fills;
  for (const Item& item : items) {
    check_item(item, numel, device);
    FS_CHECK_VALUE(item.tensor.defined() || way == Way::kGather,
                   "cannot unpack into an undefined tensor");
    if (item.tensor.defined()) {
      add(item, way, items.size());
    } else {
      fills.push_back({nullptr, item.layout->offset, item.layout->numel, item.fill});
    }
  }
  // A value has no dtype: it joins tensors of any dtype, if there are some, and needs no launch of
  // its own.
  auto group =
      std::find_if(groups_.begin(), groups_.end(), [](const auto& g) { return !g.empty(); });
  if (group == groups_.end()) group = groups_.begin() + static_cast<int64_t>(kernel_dtype(dtype));
  group->insert(group->end(), fills.begin(), fills.end());
}

void SegmentTable::add(const Item& item, Way way, size_t items) {
  const SlotLayout& layout = *item.layout;
  const at::Tensor& tensor = item.tensor;
  if (way != Way::kGather) tensor.unsafeGetTensorImpl()->bump_version();
  const bool in_order = in_slot_order(tensor, layout);
  void* memory = in_order ? tensor.data_ptr() : reordered(tensor, layout, way);
  auto& group = groups_.at(static_cast<size_t>(kernel_dtype(tensor.scalar_type())));
  if (group.empty()) group.reserve(items);  // nearly always all tensors share one dtype
  group.push_back({memory, layout.offset, layout.numel, item.fill});
}

void* SegmentTable::reordered(const at::Tensor& tensor, const SlotLayout& layout, Way way) {
  const at::Tensor memory =
      make_strided(layout.sizes, layout.strides, tensor.scalar_type(), tensor.device());
  if (way != Way::kScatter) memory.copy_(tensor);
  reordered_.emplace_back(tensor, memory);
  return memory.data_ptr();
}

void SegmentTable::finish() {
  for (const auto& [tensor, memory] : reordered_) tensor.copy_(memory);
}

std::vector<Segment> clip(const std::vector<Segment>& segments, int64_t begin, int64_t end,
                          size_t element_size) {
  std::vector<Segment> pieces;
  for (const Segment& segment : segments) {
    const int64_t from = std::max(begin, segment.offset);
    const int64_t to = std::min(end, segment.offset + segment.numel);
    if (from >= to) continue;
    Segment piece = segment;
    const int64_t skipped = from - segment.offset;
    if (piece.tensor != nullptr) {
      piece.tensor = static_cast<char*>(piece.tensor) + skipped * int64_t(element_size);
    }
    piece.offset = from;
    piece.numel = to - from;
    pieces.push_back(piece);
  }
  return pieces;
}

std::vector<Segment> slice(const std::vector<Segment>& segments, int64_t begin, int64_t end,
                           size_t element_size, int64_t block) {
  std::vector<Segment> pieces;
  int64_t start = 0;
  for (const Segment& segment : segments) {
    const auto cut = [&](int64_t at) {
      const int64_t aligned = (std::max<int64_t>(at - start, 0) + block - 1) / block * block;
      return std::min(aligned, segment.numel);
    };
    const int64_t from = cut(begin);
    const int64_t to = cut(end);
    if (from < to) {
      Segment piece = segment;
      if (piece.tensor != nullptr) {
        piece.tensor = static_cast<char*>(piece.tensor) + from * int64_t(element_size);
      }
      piece.offset += from;
      piece.numel = to - from;
      pieces.push_back(piece);
    }
    start += segment.numel;
  }
  return pieces;
}

}  // namespace fastsync::ops
