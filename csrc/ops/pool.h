// Memory that buckets take turns to use.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fastsync::ops {

// Flat buffers that are used for a part of a step, and go from one bucket to the next. A CPU's fresh memory costs as much as
// filling it; devices' allocators have pools themselves.
class BufferPool {
 public:
  // Whatever the memory holds.
  at::Tensor take(int64_t numel, at::ScalarType dtype, at::Device device);
  // One that take() returned; undefined: nothing.
  void give(const at::Tensor& buffer);
  // Likewise, but somebody still writes to it.
  void forget(const at::Tensor& buffer);

 private:
  at::Tensor take_back(const at::Tensor& buffer);

  std::vector<at::Tensor> lent_;
  std::vector<at::Tensor> free_;
};

}  // namespace fastsync::ops
