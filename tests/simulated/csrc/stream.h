// What the project's kernels are launched on: the simulated device's end of a `cudaStream_t`.
#pragma once

#include <functional>

struct CUstream_st {
  // Enqueue `run`, which owns copies of all arguments of the kernel `name`.
  virtual void launch(const char* name, std::function<void()> run) = 0;

 protected:
  ~CUstream_st() = default;
};
