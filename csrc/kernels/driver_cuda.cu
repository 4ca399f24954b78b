#include <cuda_runtime.h>

#include "driver.h"

namespace fastsync::kernels {

CudaVersions cuda_versions() {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  return {CUDART_VERSION, driver};
}

namespace {

__global__ void probe() {}

int exchanged(int mode) {
  auto capture = static_cast<cudaStreamCaptureMode>(mode);
  return cudaThreadExchangeStreamCaptureMode(&capture) == cudaSuccess ? capture : mode;
}

}  // namespace

int missing_architecture() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, probe);
  if (error == cudaSuccess) return 0;
  cudaGetLastError();  // so that no later launch reports it
  if (error != cudaErrorNoKernelImageForDevice && error != cudaErrorUnsupportedPtxVersion) return 0;
  int device = 0;
  int major = 0;
  int minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return 10 * major + minor;
}

BesideCaptures::BesideCaptures() : mode_(exchanged(cudaStreamCaptureModeThreadLocal)) {}
BesideCaptures::~BesideCaptures() { exchanged(mode_); }

}  // namespace fastsync::kernels
