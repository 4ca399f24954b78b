// Chooses the code for a device: the one place that decides.
//
// Only lambdas whose stream is `auto` may name CUDA kernels: in a build without CUDA they are never
// instantiated, so the linker needs no missing symbols.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>

#include <functional>
#include <string>

struct CUstream_st;

namespace fastsync::ops {

// Whether this build has kernels for CUDA.
bool with_cuda();

// Returns why this build cannot run the kernels on `device`, with the remedy; empty if it can. For
// a device without an index only the build and the driver are checked.
std::string device_problem(at::Device device);
// The same for versions of CUDA's runtime and driver, as kernels/driver.h numbers them. A driver
// serves its own major version and older ones; without this check the first launch fails.
std::string driver_problem(int runtime, int driver);
// The same for a device's architecture, such as 75, which the kernels were not compiled for; 0:
// they were.
std::string architecture_problem(int missing);

// Throws std::invalid_argument if this build or the driver cannot run on `device`'s kind at all.
void check_supported(at::Device device);

#ifdef FASTSYNC_WITH_CUDA
CUstream_st* current_stream(at::Device device);
#endif

// Puts a mark in the device's current stream. Returns a function that says, on any thread, whether
// the device has passed it. A failed device counts as having passed it: every later call to the
// device reports the failure.
std::function<bool()> mark_stream(at::Device device);

// Runs on_cpu(), or on_cuda(stream) with the device's current stream. For devices that this build
// supports.
template <typename Cpu, typename Cuda>
void run_kernel(at::Device device, const Cpu& on_cpu, const Cuda& on_cuda) {
  if (device.is_cpu()) {
    on_cpu();
    return;
  }
#ifdef FASTSYNC_WITH_CUDA
  const c10::DeviceGuard guard(device);
  on_cuda(current_stream(device));
#else
  (void)on_cuda;
#endif
}

}  // namespace fastsync::ops
