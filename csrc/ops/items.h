// Tensors that a kernel gathers from or scatters to, and their conversion to its table of segments.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "../kernels/pack.h"
#include "device.h"
#include "parallel.h"

namespace fastsync::ops {

// Position of one tensor's elements in a flat buffer. Elements follow the tensor's own memory order
// when its strides are non-overlapping and dense (channels-last stays channels-last), row-major
// order otherwise: the layout that autograd gives to gradients. Complex numbers count as two real
// elements.
struct SlotLayout {
  int64_t offset = 0;  // first real element in the flat buffer
  int64_t numel = 0;   // real elements
  at::DimVector sizes;
  at::DimVector strides;

  static SlotLayout of(const at::Tensor& like, int64_t offset);
  // One-dimensional.
  static SlotLayout run(int64_t offset, int64_t numel);
};

// One tensor to gather or scatter. An undefined tensor (gathering only) stands for `fill`
// everywhere, unscaled.
struct Item {
  at::Tensor tensor;
  const SlotLayout* layout = nullptr;
  float fill = 0.0F;
};

// Whether the tensor's memory holds its elements, as read, in the slot's order.
bool in_slot_order(const at::Tensor& tensor, const SlotLayout& layout);

kernels::DType kernel_dtype(at::ScalarType dtype);

constexpr size_t kDTypes = 4;

// The segments of items, by their tensors' dtype. A tensor whose memory is not in its slot's order
// is represented by a temporary that is: its copy when gathering, and copied back by finish() when
// scattering. It must live until the kernel has been launched.
class SegmentTable {
 public:
  enum class Way { kGather, kScatter, kScatterAdd };

  // The slots must fit in a flat buffer of `numel` elements on `device`. Items without tensor count
  // as `dtype` if there are no others.
  SegmentTable(const std::vector<Item>& items, Way way, int64_t numel, at::Device device,
               at::ScalarType dtype);
  // Copies temporaries to the tensors they stand for.
  void finish();

  // Calls launch(dtype, segments) for each dtype that occurs.
  template <typename Launch>
  void for_each(const Launch& launch) const {
    for (size_t i = 0; i < kDTypes; ++i) {
      if (!groups_.at(i).empty()) launch(static_cast<kernels::DType>(i), groups_.at(i));
    }
  }

 private:
  // `items`: the number of all, for which room is made.
  void add(const Item& item, Way way, size_t items);
  // Returns the memory of a temporary in the slot's order.
  void* reordered(const at::Tensor& tensor, const SlotLayout& layout, Way way);

  std::array<std::vector<kernels::Segment>, kDTypes> groups_;
  std::vector<std::pair<at::Tensor, at::Tensor>> reordered_;  // tensor, temporary
};

// Returns the part of `segments` that covers elements [begin, end) of their concatenation, cut at
// multiples of `block` within each.
std::vector<kernels::Segment> slice(const std::vector<kernels::Segment>& segments, int64_t begin,
                                    int64_t end, size_t element_size, int64_t block);

// Returns the parts of `segments` that lie in elements [begin, end) of the flat buffer.
std::vector<kernels::Segment> clip(const std::vector<kernels::Segment>& segments, int64_t begin,
                                   int64_t end, size_t element_size);

// Granularity of cuts of segments: whole blocks of elements of this size.
struct Grid {
  size_t element_size;
  int64_t block;
};

// Runs on_cpu(segments, count) for parts that together make up `segments`, on the intra-op threads;
// or on_cuda(segments, count, stream) for all at once. See run_kernel().
template <typename Cpu, typename Cuda>
void run_on_segments(const std::vector<kernels::Segment>& segments, at::Device device, Grid grid,
                     const Cpu& on_cpu, const Cuda& on_cuda) {
  const auto by_parts = [&] {
    int64_t total = 0;
    for (const kernels::Segment& segment : segments) total += segment.numel;
    if (stays_here(total)) return on_cpu(segments.data(), segments.size());
    parallel_ranges(total, 1, [&](int64_t begin, int64_t end) {
      const auto part = slice(segments, begin, end, grid.element_size, grid.block);
      on_cpu(part.data(), part.size());
    });
  };
  run_kernel(device, by_parts,
             [&](auto stream) { on_cuda(segments.data(), segments.size(), stream); });
}

}  // namespace fastsync::ops
