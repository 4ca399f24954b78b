#include <cuda_runtime.h>

#include "driver.h"

namespace fastsync::kernels {

CudaVersions cuda_versions() {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  return {CUDART_VERSION, driver};
}

}  // namespace fastsync::kernels
