// Pack and unpack on at::Tensors: checks, dtype and device dispatch, and the stream, in front of
// `kernels/`.
//
// This is the only place where pointers leave tensors, and only for the length of one call.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/strides.h>

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "../kernels/scale.h"
#include "buffers.h"
#include "items.h"

namespace fastsync::ops {

// A factor: a number, or what a tensor on the device of the other tensors says by then, so that the
// host need not wait for it.
struct Scale {
  Scale(double number = 1.0) : value(number) {}  // NOLINT(google-explicit-constructor)
  // 0-d, fp64.
  explicit Scale(at::Tensor of) : tensor(std::move(of)) {}

  bool is_one() const { return !tensor.defined() && value == 1.0; }
  // Valid while the tensor lives.
  kernels::Scale for_kernels() const;

  double value = 1.0;
  at::Tensor tensor;  // undefined: `value` counts
};

// flat[layout] = cast(tensor * scale) for every item: one kernel per tensor dtype, usually one
// launch. A tensor whose strides differ from its layout goes through a temporary copy.
void pack(const std::vector<Item>& items, const at::Tensor& flat, const Scale& scale);

// tensor = cast(flat[layout] * scale), plus the old value when `accumulate`. Bumps the tensors'
// version counters.
void unpack(const std::vector<Item>& items, const at::Tensor& flat, const Scale& scale,
            bool accumulate);

// Makes a separate storage for the memory of `flat`, on a CPU, at `layout`. It keeps all of that
// memory alive.
c10::Storage part_of(const at::Tensor& flat, const SlotLayout& layout);

// Whether `part` still has that memory: storages can be given other memory.
bool is_part_of(const c10::Storage& part, const at::Tensor& flat, const SlotLayout& layout);

// A tensor of the layout's sizes that shares `flat`'s memory at `layout`, and its storage, or that
// of the `part` there. Costs no dispatched operation and carries no autograd view metadata, so
// optimizers may detach or zero it. Needs flat and tensor of equal real dtype.
at::Tensor view_of(const at::Tensor& flat, const SlotLayout& layout, at::ScalarType dtype,
                   const c10::Storage& part = {});

// Elements [begin, begin + numel) of a one-dimensional tensor, likewise.
inline at::Tensor run_of(const at::Tensor& flat, int64_t begin, int64_t numel) {
  return view_of(flat, SlotLayout::run(begin, numel), flat.scalar_type());
}

// Whether `tensor` is that view: same storage, place and strides.
bool is_view_of(const at::Tensor& tensor, const at::Tensor& flat, const SlotLayout& layout,
                const c10::Storage& part = {});

// The first element of a CPU tensor of a packable dtype. Costs no dispatched operation.
double first_element(const at::Tensor& tensor);

// The same elements side by side, in row-major order.
inline SlotLayout compact(int64_t offset, int64_t numel, at::IntArrayRef sizes) {
  return {offset, numel, at::DimVector(sizes), c10::contiguous_strides(sizes)};
}

// Items made anew for each call, with the layouts that they point to.
class ItemList {
 public:
  // `tensor`, none for `fill` everywhere, and elements of a flat buffer that begin at `offset`.
  void add(const at::Tensor& tensor, int64_t offset, const SlotLayout& like, float fill = 0) {
    if (like.numel == 0) return;
    layouts_.push_back(compact(offset, like.numel, like.sizes));
    items_.push_back({tensor, &layouts_.back(), fill});
  }
  void add_run(const at::Tensor& tensor, int64_t offset, int64_t numel, float fill = 0) {
    add(tensor, offset, SlotLayout::run(0, numel), fill);
  }

  const std::vector<Item>& items() const { return items_; }

  void pack(const at::Tensor& flat, const Scale& scale) const {
    if (!items_.empty()) ops::pack(items_, flat, scale);
  }
  void unpack(const at::Tensor& flat, const Scale& scale, bool accumulate) const {
    if (!items_.empty()) ops::unpack(items_, flat, scale, accumulate);
  }

 private:
  std::deque<SlotLayout> layouts_;
  std::vector<Item> items_;
};

}  // namespace fastsync::ops
