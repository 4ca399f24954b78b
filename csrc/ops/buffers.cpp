#include "buffers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace fastsync::ops {
namespace {

at::TensorOptions options_of(at::ScalarType dtype, at::Device device) {
  return at::TensorOptions().dtype(dtype).device(device);
}

}  // namespace

at::Tensor make_zeros(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  const at::NoGradGuard no_grad;
  return at::zeros(sizes, options_of(dtype, device));
}

at::Tensor make_flat(int64_t numel, at::ScalarType dtype, at::Device device) {
  return make_zeros({numel}, dtype, device);
}

at::Tensor make_scratch(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device) {
  return at::empty(sizes, options_of(dtype, device));
}

at::Tensor make_strided(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                        at::Device device) {
  return at::empty_strided(sizes, strides, options_of(dtype, device));
}

at::Tensor make_pinned_scalar(at::ScalarType dtype) {
  return at::empty({1}, options_of(dtype, at::kCPU).pinned_memory(true));
}

at::Tensor make_over(void* memory, int64_t numel, at::ScalarType dtype,
                     std::function<void()> release) {
  const at::NoGradGuard no_grad;
  return at::for_blob(memory, {numel})
      .deleter([release = std::move(release)](void*) { release(); })
      .options(options_of(dtype, at::kCPU))
      .make_tensor();
}

at::DataPtr lend(const c10::Storage& storage, void* begin) {
  const auto drop = [](void* held) {
    c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(held));
  };
  return {begin, c10::Storage(storage).unsafeReleaseStorageImpl(), drop, storage.device()};
}

at::Tensor copy_of(const at::Tensor& tensor) { return tensor.clone(); }

void record_here(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return;
  if (tensor.is_sparse()) {
    record_here(tensor._indices());
    return record_here(tensor._values());
  }
  const c10::impl::VirtualGuardImpl guard(tensor.device().type());
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), guard.getStream(tensor.device()));
}

}  // namespace fastsync::ops
