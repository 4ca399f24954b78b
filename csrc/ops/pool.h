// Memory that buckets use in turn.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace fastsync::ops {

// Flat buffers that are used for a part of a step, and go from one bucket to the next. A CPU's
// fresh memory costs as much as filling it; devices' allocators have pools themselves.
class BufferPool {
 public:
  using Make = std::function<at::Tensor(int64_t numel, at::ScalarType dtype, at::Device device)>;

  // `make`: allocates a CPU's memory, instead of the allocator.
  explicit BufferPool(Make make = nullptr) : make_(std::move(make)) {}
  // Calls `reclaim` before a search for a buffer, to return buffers that are not used any more, and
  // again if none is found: `pressed`, it may wait for a moment. Null ends that.
  void reclaim_with(std::function<void(bool pressed)> reclaim) { reclaim_ = std::move(reclaim); }

  // Returns an uninitialised buffer.
  at::Tensor take(int64_t numel, at::ScalarType dtype, at::Device device);
  // Takes back a buffer of take(); undefined: nothing.
  void give(const at::Tensor& buffer);
  // The same for a buffer that is still read or written.
  void forget(const at::Tensor& buffer);
  // Either: forgets the buffer if `in_flight`.
  void end(const at::Tensor& buffer, bool in_flight) {
    return in_flight ? forget(buffer) : give(buffer);
  }

 private:
  using Free = std::vector<at::Tensor>;

  // The smallest free buffer that fits.
  Free::iterator find(int64_t numel, at::ScalarType dtype);
  at::Tensor make(int64_t numel, at::ScalarType dtype, at::Device device) const;
  at::Tensor take_back(const at::Tensor& buffer);

  Make make_;
  std::function<void(bool)> reclaim_;
  std::vector<at::Tensor> used_;
  Free free_;
};

}  // namespace fastsync::ops
