// Enough of CUDA to compile a .cu file as C++ and run its kernels on the host, one thread after
// another; threads of a warp take turns at shuffles (cuda_warp.h).
//
// Sound for indexing, tails, alignment and who waits for whom, above all under sanitizers; it says
// nothing about streams, memory order or speed. Include it before the .cu file.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cuda_warp.h"

struct CUstream_st;
using cudaStream_t = CUstream_st*;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };

namespace cuda_shim {

struct Index {
  unsigned x;
};

inline Index thread{0};
inline Index block{0};
inline int launches = 0;                   // since the test last reset it
inline unsigned blocks = 0;                // of the latest launch
inline cudaError_t failure = cudaSuccess;  // reported by the next cudaGetLastError()

template <class Kernel, class... Args>
void run(Kernel kernel, unsigned grid, unsigned threads, const Args&... args) {
  ++launches;
  blocks = grid;
  for (block.x = 0; block.x < grid; ++block.x) {
    for (unsigned first = 0; first < threads; first += kWarpSize) {
      Warp::instance().run(thread.x, first, std::min(kWarpSize, threads - first),
                           [&](unsigned) { kernel(args...); });
    }
  }
}

}  // namespace cuda_shim

// Dereferencing one that is not 16-byte aligned is an error on the device, and here under UBSan.
struct [[gnu::may_alias]] alignas(16) uint4 {
  unsigned x, y, z, w;
};

struct [[gnu::may_alias]] alignas(8) uint2 {
  unsigned x, y;
};

template <class T>
void __stwb(T* to, const T& value) {
  *to = value;
}

inline unsigned __shfl_xor_sync(unsigned, unsigned value, int lanes) {
  return cuda_shim::Warp::instance().shuffle_xor(value, static_cast<unsigned>(lanes));
}

inline cudaError_t cudaGetLastError() {
  const cudaError_t error = cuda_shim::failure;
  cuda_shim::failure = cudaSuccess;
  return error;
}
inline const char* cudaGetErrorString(cudaError_t) { return "invalid configuration argument"; }
inline const char* cudaGetErrorName(cudaError_t) { return "cudaErrorInvalidConfiguration"; }

#define __global__
#define __host__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define threadIdx (cuda_shim::thread)
#define blockIdx (cuda_shim::block)
#define FS_CUDA_LAUNCH(kernel, grid, block, stream, ...) \
  (static_cast<void>(stream), cuda_shim::run(kernel, grid, block, __VA_ARGS__))
