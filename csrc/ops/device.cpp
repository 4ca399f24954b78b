#include "device.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "../check.h"

namespace fastsync::ops {

bool supports(at::Device device) {
#ifdef FASTSYNC_WITH_CUDA
  return device.is_cpu() || device.is_cuda();
#else
  return device.is_cpu();
#endif
}

void check_supported(at::Device device) {
  FS_CHECK_VALUE(supports(device), "this build has no kernels for ", device,
                 "; install a CUDA toolkit (nvcc) and rebuild, or keep the model on the CPU");
}

#ifdef FASTSYNC_WITH_CUDA
// c10 knows the current stream of a device without any CUDA header.
CUstream_st* current_stream(at::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return static_cast<CUstream_st*>(guard.getStreamNativeHandle(guard.getStream(device)));
}
#endif

}  // namespace fastsync::ops
