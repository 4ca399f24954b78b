#include "ops.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>

#include <utility>

#include "../check.h"
#include "../kernels/pack.h"

namespace fastsync::ops {
namespace {

using kernels::DType;
using kernels::Segment;
using kernels::Transfer;
using Way = SegmentTable::Way;

void check_flat(const at::Tensor& flat) {
  FS_CHECK_VALUE(flat.defined() && flat.dim() == 1 && flat.is_contiguous(),
                 "expects a contiguous one-dimensional flat buffer");
  check_supported(flat.device());
}

void run(const SegmentTable& table, const at::Tensor& flat, const Scale& scale, Way way) {
  void* data = flat.data_ptr();
  Transfer transfer{DType::kFloat32, kernel_dtype(flat.scalar_type()), scale.for_kernels(),
                    way == Way::kScatterAdd};
  const bool pack = way == Way::kGather;
  table.for_each([&](DType dtype, const std::vector<Segment>& segments) {
    transfer.tensor_dtype = dtype;
    run_on_segments(
        segments, flat.device(), {kernels::element_size(dtype), 1},
        [&](const Segment* part, size_t count) {
          if (pack) {
            kernels::pack_cpu(part, count, data, transfer);
          } else {
            kernels::unpack_cpu(part, count, data, transfer);
          }
        },
        [&](const Segment* all, size_t count, auto stream) {
          if (pack) {
            kernels::pack_cuda(all, count, data, transfer, stream);
          } else {
            kernels::unpack_cuda(all, count, data, transfer, stream);
          }
        });
  });
}

void* begin_of(const at::Tensor& flat, const SlotLayout& layout) {
  const int64_t elements = flat.storage_offset() + layout.offset;
  return static_cast<char*>(flat.storage().mutable_data()) +
         elements * static_cast<int64_t>(flat.itemsize());
}

}  // namespace

kernels::Scale Scale::for_kernels() const {
  if (!tensor.defined()) return value;
  if (tensor.is_cpu()) return *tensor.const_data_ptr<double>();
  return kernels::Scale(tensor.const_data_ptr<double>());
}

void pack(const std::vector<Item>& items, const at::Tensor& flat, const Scale& scale) {
  check_flat(flat);
  const at::NoGradGuard no_grad;
  const SegmentTable table(items, Way::kGather, flat.numel(), flat.device(), flat.scalar_type());
  run(table, flat, scale, Way::kGather);
}

void unpack(const std::vector<Item>& items, const at::Tensor& flat, const Scale& scale,
            bool accumulate) {
  check_flat(flat);
  const at::NoGradGuard no_grad;
  const Way way = accumulate ? Way::kScatterAdd : Way::kScatter;
  SegmentTable table(items, way, flat.numel(), flat.device(), flat.scalar_type());
  run(table, flat, scale, way);
  table.finish();
}

c10::Storage part_of(const at::Tensor& flat, const SlotLayout& layout) {
  const auto bytes = layout.numel * static_cast<int64_t>(flat.itemsize());
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, lend(flat.storage(), begin_of(flat, layout)),
      c10::GetCPUAllocator(), /*resizable=*/true));
}

bool is_part_of(const c10::Storage& part, const at::Tensor& flat, const SlotLayout& layout) {
  return part.data() == begin_of(flat, layout);
}

at::Tensor view_of(const at::Tensor& flat, const SlotLayout& layout, at::ScalarType dtype,
                   const c10::Storage& part) {
  FS_ASSERT(c10::toRealValueType(dtype) == flat.scalar_type(), "view of another dtype");
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(part ? part : flat.storage()), flat.key_set(),
      c10::scalarTypeToTypeMeta(dtype));
  const int64_t per_element = c10::isComplexType(dtype) ? 2 : 1;
  const int64_t offset = part ? 0 : flat.storage_offset() + layout.offset;
  impl->set_sizes_and_strides(layout.sizes, layout.strides, offset / per_element);
  return at::Tensor(std::move(impl));
}

bool is_view_of(const at::Tensor& tensor, const at::Tensor& flat, const SlotLayout& layout,
                const c10::Storage& part) {
  if (!tensor.defined() || !flat.defined() || tensor.layout() != at::kStrided) return false;
  const int64_t per_element = tensor.is_complex() ? 2 : 1;
  const c10::Storage& storage = part ? part : flat.storage();
  const int64_t offset = part ? 0 : flat.storage_offset() + layout.offset;
  return tensor.storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl() &&
         tensor.storage_offset() * per_element == offset &&
         tensor.sizes() == at::IntArrayRef(layout.sizes) && in_slot_order(tensor, layout) &&
         c10::toRealValueType(tensor.scalar_type()) == flat.scalar_type();
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

}  // namespace fastsync::ops
