// Launching kernels: the one place with the <<<>>> syntax, and the check of every launch.
//
// A host build of a .cu file (csrc/tests/cuda_shim.h) defines FS_CUDA_LAUNCH and the few CUDA names itself, and
// FS_CUDA_LAUNCH_TEAMS for kernels with __syncthreads(), which need more of it.
#pragma once

#include "../check.h"

#ifndef FS_CUDA_LAUNCH
#include <cuda_runtime.h>
#define FS_CUDA_LAUNCH(kernel, grid, block, stream, ...) \
  kernel<<<grid, block, 0, stream>>>(__VA_ARGS__)
#define FS_CUDA_LAUNCH_TEAMS FS_CUDA_LAUNCH
#endif

// `call` returns a cudaError_t; the parts after it say what was being done.
#define FS_CUDA_CHECK(call, ...)                                                             \
  do {                                                                                       \
    const cudaError_t fs_error = (call);                                                     \
    FS_CHECK(fs_error == cudaSuccess, __VA_ARGS__, ": ", cudaGetErrorString(fs_error), " (", \
             cudaGetErrorName(fs_error), ")");                                               \
  } while (false)
