// Stream of the simulated device, its end of a `cudaStream_t`, on which the project's kernels are
// launched.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

namespace simulated {

// Memory that a task reads or writes. `surely`: all of it, so that no fault need tell.
struct Range {
  const void* begin;
  size_t bytes;
  bool written;
  bool surely = false;
};

// Runs a kernel, and returns what it has read and written of the memory given.
using Kernel = std::function<std::vector<Range>(const void* memory, size_t bytes)>;

}  // namespace simulated

struct CUstream_st {
  // Enqueue `run`, which owns copies of all arguments of the kernel `name`.
  virtual void launch(const char* name, simulated::Kernel run) = 0;

 protected:
  ~CUstream_st() = default;
};
