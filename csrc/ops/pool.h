// Memory that buckets take turns to use.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace fastsync::ops {

// Flat buffers that are used for a part of a step, and go from one bucket to the next. A CPU's fresh memory costs as much as
// filling it; devices' allocators have pools themselves.
class BufferPool {
 public:
  using Make = std::function<at::Tensor(int64_t numel, at::ScalarType dtype, at::Device device)>;

  // `make`: where a CPU's memory comes from, instead of the allocator.
  explicit BufferPool(Make make = nullptr) : make_(std::move(make)) {}
  // Has `reclaim` called before a buffer is looked for, to give back what nobody uses any more, and again where none is found:
  // `pressed`, it may wait for a moment. Null: no longer.
  void reclaim_with(std::function<void(bool pressed)> reclaim) { reclaim_ = std::move(reclaim); }

  // Whatever the memory holds.
  at::Tensor take(int64_t numel, at::ScalarType dtype, at::Device device);
  // One that take() returned; undefined: nothing.
  void give(const at::Tensor& buffer);
  // Likewise, but somebody still reads it, or writes to it.
  void forget(const at::Tensor& buffer);
  // Either: `in_flight`, forgets it.
  void end(const at::Tensor& buffer, bool in_flight) {
    return in_flight ? forget(buffer) : give(buffer);
  }

 private:
  using Free = std::vector<at::Tensor>;

  // Of those that nobody has, the smallest that fits.
  Free::iterator find(int64_t numel, at::ScalarType dtype);
  at::Tensor make(int64_t numel, at::ScalarType dtype, at::Device device) const;
  at::Tensor take_back(const at::Tensor& buffer);

  Make make_;
  std::function<void(bool)> reclaim_;
  std::vector<at::Tensor> lent_;
  Free free_;
};

}  // namespace fastsync::ops
