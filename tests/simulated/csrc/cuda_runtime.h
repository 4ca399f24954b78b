// In place of CUDA's header, for .cu files that are compiled as C++: kernels run on the host, in
// the order of their stream.
//
// The shim counts blocks and threads in variables of the process, so one kernel runs at a time.
#pragma once

#include <tuple>

#include "accesses.h"
#include "stream.h"
#include "tests/cuda_shim.h"

namespace simulated {

template <class Kernel, class... Args>
void launch(const char* name, CUstream_st* stream, Kernel kernel, unsigned grid, unsigned threads,
            const Args&... args) {
  const auto run = [=, kept = std::tuple<Args...>(args...)](const void* memory, size_t bytes) {
    begin_accesses(memory, bytes);
    std::apply([&](const Args&... all) { cuda_shim::run(kernel, grid, threads, all...); }, kept);
    return end_accesses();
  };
  stream->launch(name, run);
}

}  // namespace simulated

#undef FS_CUDA_LAUNCH
#define FS_CUDA_LAUNCH(kernel, grid, block, stream, ...) \
  simulated::launch(#kernel, stream, kernel, grid, block, __VA_ARGS__)

#define CUDART_VERSION 13000
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

// A simulated device captures no graphs.
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 };
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}

// There is code for every simulated device.
constexpr cudaError_t cudaErrorNoKernelImageForDevice = static_cast<cudaError_t>(209);
constexpr cudaError_t cudaErrorUnsupportedPtxVersion = static_cast<cudaError_t>(222);
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor };
struct cudaFuncAttributes {};
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void (*)()) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int*) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int*, cudaDeviceAttr, int) { return cudaSuccess; }
