// Stream of the simulated device, its end of a `cudaStream_t`, on which the project's kernels are
// launched.
#pragma once

#include <functional>

struct CUstream_st {
  // Enqueue `run`, which owns copies of all arguments of the kernel `name`.
  virtual void launch(const char* name, std::function<void()> run) = 0;

 protected:
  ~CUstream_st() = default;
};
