#include "ops.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <array>

#include "check.h"
#include "kernels/pack.h"

namespace fastsync::ops {
namespace {

using kernels::DType;
using kernels::Segment;
using kernels::Transfer;

constexpr size_t kDTypes = 4;
using SegmentsByDType = std::array<std::vector<Segment>, kDTypes>;

// Elements below which another CPU thread costs more than it saves (128 KiB of fp32).
constexpr int64_t kGrain = 32768;

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

// Whether the tensor's memory holds its elements, as they read, in the slot's order. The stride of a dimension of size 1
// means nothing, and autograd may hand over gradients that are only marked as conjugated or negated.
bool in_slot_order(const at::Tensor& tensor, const SlotLayout& layout) {
  if (tensor.is_conj() || tensor.is_neg()) return false;
  if (tensor.numel() <= 1) return true;
  for (size_t d = 0; d < layout.sizes.size(); ++d) {
    const auto dim = static_cast<int64_t>(d);
    if (layout.sizes[d] != 1 && tensor.stride(dim) != layout.strides[d]) return false;
  }
  return true;
}

void check_item(const Item& item, const at::Tensor& flat) {
  const SlotLayout& layout = *item.layout;
  FS_CHECK_VALUE(layout.offset >= 0 && layout.offset + layout.numel <= flat.numel(), "a slot of ",
                 layout.numel, " elements at offset ", layout.offset,
                 " does not fit in a flat buffer of ", flat.numel(), " elements");
  if (!item.tensor.defined()) return;
  FS_CHECK_VALUE(item.tensor.layout() == at::kStrided, "expects dense tensors but got layout ",
                 item.tensor.layout());
  FS_CHECK_VALUE(item.tensor.sizes() == at::IntArrayRef(layout.sizes), "expects a tensor of sizes ",
                 at::IntArrayRef(layout.sizes), " but got ", item.tensor.sizes());
  FS_CHECK_VALUE(item.tensor.device() == flat.device(), "expects a tensor on ", flat.device(),
                 " but got one on ", item.tensor.device());
}

void check_flat(const at::Tensor& flat) {
  FS_CHECK_VALUE(flat.defined() && flat.dim() == 1 && flat.is_contiguous(),
                 "expects a contiguous one-dimensional flat buffer");
  FS_CHECK_VALUE(supports(flat.device()), "this build has no kernels for ", flat.device(),
                 "; install a CUDA toolkit (nvcc) and rebuild, or keep the model on the CPU");
}

void append(SegmentsByDType& groups, at::ScalarType dtype, void* data, const Item& item) {
  const SlotLayout& layout = *item.layout;
  groups.at(static_cast<size_t>(kernel_dtype(dtype)))
      .push_back(Segment{data, layout.offset, layout.numel, item.fill});
}

#ifdef FASTSYNC_WITH_CUDA
// c10 knows the current stream of a device without any CUDA header.
CUstream_st* current_stream(at::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return static_cast<CUstream_st*>(guard.getStreamNativeHandle(guard.getStream(device)));
}
#endif

// The part of `segments` that covers elements [begin, end) of their concatenation.
std::vector<Segment> slice(const std::vector<Segment>& segments, int64_t begin, int64_t end,
                           size_t element_size) {
  std::vector<Segment> pieces;
  int64_t start = 0;
  for (const Segment& segment : segments) {
    const int64_t from = std::max(begin, start);
    const int64_t to = std::min(end, start + segment.numel);
    if (from < to) {
      Segment piece = segment;
      if (piece.tensor != nullptr) {
        piece.tensor = static_cast<char*>(piece.tensor) + (from - start) * int64_t(element_size);
      }
      piece.offset += from - start;
      piece.numel = to - from;
      pieces.push_back(piece);
    }
    start += segment.numel;
  }
  return pieces;
}

template <typename Kernel>
void run_on_cpu(const std::vector<Segment>& segments, const Transfer& transfer,
                const Kernel& kernel) {
  int64_t total = 0;
  for (const Segment& segment : segments) total += segment.numel;
  if (total < 2 * kGrain || at::get_num_threads() == 1 || at::in_parallel_region()) {
    kernel(segments);
    return;
  }
  const size_t size = kernels::element_size(transfer.tensor_dtype);
  at::parallel_for(0, total, kGrain,
                   [&](int64_t begin, int64_t end) { kernel(slice(segments, begin, end, size)); });
}

void run(const SegmentsByDType& groups, const at::Tensor& flat, Transfer transfer, bool is_pack) {
  const c10::DeviceGuard device(flat.device());
  void* data = flat.data_ptr();
  for (size_t group = 0; group < kDTypes; ++group) {
    const std::vector<Segment>& segments = groups.at(group);
    if (segments.empty()) continue;
    transfer.tensor_dtype = static_cast<DType>(group);
    if (flat.is_cpu()) {
      run_on_cpu(segments, transfer, [&](const std::vector<Segment>& part) {
        if (is_pack) {
          kernels::pack_cpu(part.data(), part.size(), data, transfer);
        } else {
          kernels::unpack_cpu(part.data(), part.size(), data, transfer);
        }
      });
      continue;
    }
#ifdef FASTSYNC_WITH_CUDA
    CUstream_st* stream = current_stream(flat.device());
    if (is_pack) {
      kernels::pack_cuda(segments.data(), segments.size(), data, transfer, stream);
    } else {
      kernels::unpack_cuda(segments.data(), segments.size(), data, transfer, stream);
    }
#endif
  }
}

// `tensor` itself where its memory is in the slot's order, else an empty tensor that is.
at::Tensor in_order_like(const at::Tensor& tensor, const SlotLayout& layout) {
  if (in_slot_order(tensor, layout)) return tensor;
  return at::empty_strided(layout.sizes, layout.strides, tensor.options());
}

}  // namespace

SlotLayout SlotLayout::of(const at::Tensor& like, int64_t offset) {
  SlotLayout layout;
  layout.offset = offset;
  layout.numel = like.numel() * (like.is_complex() ? 2 : 1);
  layout.sizes = like.sizes().vec();
  layout.strides = like.strides().vec();
  if (!like.is_non_overlapping_and_dense()) {
    const auto row_major = c10::contiguous_strides(like.sizes());
    layout.strides.assign(row_major.begin(), row_major.end());
  }
  return layout;
}

void pack(const std::vector<Item>& items, const at::Tensor& flat, double scale) {
  check_flat(flat);
  const at::NoGradGuard no_grad;
  SegmentsByDType groups;
  std::vector<at::Tensor> reordered;  // must outlive the kernel
  for (const Item& item : items) {
    check_item(item, flat);
    if (!item.tensor.defined()) {
      append(groups, flat.scalar_type(), nullptr, item);
      continue;
    }
    at::Tensor source = in_order_like(item.tensor, *item.layout);
    if (!source.is_same(item.tensor)) reordered.push_back(source.copy_(item.tensor));
    append(groups, source.scalar_type(), source.data_ptr(), item);
  }
  run(groups, flat, Transfer{DType::kFloat32, kernel_dtype(flat.scalar_type()), scale, false},
      true);
}

void unpack(const std::vector<Item>& items, const at::Tensor& flat, double scale, bool accumulate) {
  check_flat(flat);
  const at::NoGradGuard no_grad;
  SegmentsByDType groups;
  std::vector<std::pair<at::Tensor, at::Tensor>> reordered;
  for (const Item& item : items) {
    FS_CHECK_VALUE(item.tensor.defined(), "cannot unpack into an undefined tensor");
    check_item(item, flat);
    at::Tensor target = in_order_like(item.tensor, *item.layout);
    if (!target.is_same(item.tensor)) {
      if (accumulate) target.copy_(item.tensor);
      reordered.emplace_back(item.tensor, target);
    }
    append(groups, target.scalar_type(), target.data_ptr(), item);
    item.tensor.unsafeGetTensorImpl()->bump_version();
  }
  run(groups, flat, Transfer{DType::kFloat32, kernel_dtype(flat.scalar_type()), scale, accumulate},
      false);
  for (const auto& [tensor, target] : reordered) tensor.copy_(target);
}

at::Tensor view_of(const at::Tensor& flat, const SlotLayout& layout, at::ScalarType dtype) {
  FS_ASSERT(c10::toRealValueType(dtype) == flat.scalar_type(), "view of another dtype");
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(flat.storage()),
                                           flat.key_set(), c10::scalarTypeToTypeMeta(dtype));
  const int64_t per_element = c10::isComplexType(dtype) ? 2 : 1;
  impl->set_sizes_and_strides(layout.sizes, layout.strides,
                              (flat.storage_offset() + layout.offset) / per_element);
  return at::Tensor(std::move(impl));
}

bool is_view_of(const at::Tensor& tensor, const at::Tensor& flat, const SlotLayout& layout) {
  if (!tensor.defined() || !flat.defined() || tensor.layout() != at::kStrided) return false;
  const int64_t per_element = tensor.is_complex() ? 2 : 1;
  return tensor.storage().unsafeGetStorageImpl() == flat.storage().unsafeGetStorageImpl() &&
         tensor.storage_offset() * per_element == flat.storage_offset() + layout.offset &&
         tensor.sizes() == at::IntArrayRef(layout.sizes) && in_slot_order(tensor, layout) &&
         c10::toRealValueType(tensor.scalar_type()) == flat.scalar_type();
}

at::Tensor make_flat(int64_t numel, at::ScalarType dtype, at::Device device) {
  const at::NoGradGuard no_grad;
  return at::zeros({numel}, at::TensorOptions().dtype(dtype).device(device));
}

double first_element(const at::Tensor& tensor) {
  float value = 0.0F;
  switch (kernel_dtype(tensor.scalar_type())) {
    case DType::kFloat64:
      return *static_cast<const double*>(tensor.const_data_ptr());
    case DType::kFloat32:
      return *static_cast<const float*>(tensor.const_data_ptr());
    case DType::kFloat16:
      value = *static_cast<const at::Half*>(tensor.const_data_ptr());
      break;
    case DType::kBFloat16:
      value = *static_cast<const at::BFloat16*>(tensor.const_data_ptr());
      break;
  }
  return value;
}

bool supports(at::Device device) {
#ifdef FASTSYNC_WITH_CUDA
  return device.is_cpu() || device.is_cuda();
#else
  return device.is_cpu();
#endif
}

}  // namespace fastsync::ops
