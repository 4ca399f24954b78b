#include <cuda_runtime.h>

#include "driver.h"

namespace fastsync::kernels {

CudaVersions cuda_versions() {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  return {CUDART_VERSION, driver};
}

namespace {

int exchanged(int mode) {
  auto capture = static_cast<cudaStreamCaptureMode>(mode);
  return cudaThreadExchangeStreamCaptureMode(&capture) == cudaSuccess ? capture : mode;
}

}  // namespace

BesideCaptures::BesideCaptures() : mode_(exchanged(cudaStreamCaptureModeThreadLocal)) {}
BesideCaptures::~BesideCaptures() { exchanged(mode_); }

}  // namespace fastsync::kernels
