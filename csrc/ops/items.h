// Tensors that a kernel gathers from or scatters to, and how they become its table of segments.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "../kernels/pack.h"

namespace fastsync::ops {

// Where one tensor's elements lie in a flat buffer. Elements follow the tensor's own memory order when its strides are
// non-overlapping and dense (channels-last stays channels-last), row-major order otherwise: the layout that autograd
// gives to gradients. Complex numbers count as two real elements.
struct SlotLayout {
  int64_t offset = 0;  // first real element in the flat buffer
  int64_t numel = 0;   // real elements
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;

  static SlotLayout of(const at::Tensor& like, int64_t offset);
  // One-dimensional.
  static SlotLayout run(int64_t offset, int64_t numel);
};

// One tensor to gather or scatter. An undefined tensor (gathering only) stands for `fill` everywhere, unscaled.
struct Item {
  at::Tensor tensor;
  const SlotLayout* layout = nullptr;
  float fill = 0.0F;
};

// Whether this build can run the kernels on `device`.
bool supports(at::Device device);

// Whether the tensor's memory holds its elements, as they read, in the slot's order.
bool in_slot_order(const at::Tensor& tensor, const SlotLayout& layout);

kernels::DType kernel_dtype(at::ScalarType dtype);

#ifdef FASTSYNC_WITH_CUDA
CUstream_st* current_stream(at::Device device);
#endif

constexpr size_t kDTypes = 4;

// The segments of items, by their tensors' dtype. A tensor whose memory is not in its slot's order is represented by a
// temporary that is: its copy when gathering, and copied back by finish() when scattering. Must outlive the kernel's launch.
class SegmentTable {
 public:
  enum class Way { kGather, kScatter, kScatterAdd };

  // The slots must fit in a flat buffer of `numel` elements on `device`, whose items without tensor are of `dtype`.
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
  void add(const Item& item, Way way, at::ScalarType dtype);

  std::array<std::vector<kernels::Segment>, kDTypes> groups_;
  std::vector<std::pair<at::Tensor, at::Tensor>> reordered_;  // tensor, temporary
};

// The part of `segments` that covers elements [begin, end) of their concatenation, cut at multiples of `block` within each.
std::vector<kernels::Segment> slice(const std::vector<kernels::Segment>& segments, int64_t begin,
                                    int64_t end, size_t element_size, int64_t block);

// The parts of `segments` that lie in elements [begin, end) of the flat buffer.
std::vector<kernels::Segment> clip(const std::vector<kernels::Segment>& segments, int64_t begin,
                                   int64_t end, size_t element_size);

// Elements below which another CPU thread costs more than it saves (128 KiB of fp32).
constexpr int64_t kGrain = 32768;

// Calls kernel(part) for parts of `segments` that together are all of them, on the intra-op threads.
template <typename Kernel>
void run_on_cpu(const std::vector<kernels::Segment>& segments, size_t element_size, int64_t block,
                const Kernel& kernel) {
  int64_t total = 0;
  for (const kernels::Segment& segment : segments) total += segment.numel;
  if (total < 2 * kGrain || at::get_num_threads() == 1 || at::in_parallel_region()) {
    kernel(segments);
    return;
  }
  at::parallel_for(0, total, kGrain, [&](int64_t begin, int64_t end) {
    kernel(slice(segments, begin, end, element_size, block));
  });
}

}  // namespace fastsync::ops
