#include "device.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>

#include "../check.h"
#ifdef FASTSYNC_WITH_CUDA
#include "../kernels/driver.h"
#endif

namespace fastsync::ops {

namespace {

// The oldest Linux driver of each major version, within which any minor version runs.
const char* oldest_driver(int major) {
  switch (major) {
    case 11:
      return " (450 or newer)";
    case 12:
      return " (525 or newer)";
    case 13:
      return " (580 or newer)";
  }
  return "";
}

#ifdef FASTSYNC_WITH_CUDA
const std::string& problem_with_driver() {
  static const std::string problem = [] {
    const kernels::CudaVersions versions = kernels::cuda_versions();
    return driver_problem(versions.runtime, versions.driver);
  }();
  return problem;
}
#endif

}  // namespace

std::string driver_problem(int runtime, int driver) {
  const int major = runtime / 1000;
  if (driver / 1000 >= major) return {};
  const std::string found =
      driver == 0 ? std::string("there is none here")
                  : concat("the one here serves CUDA ", driver / 1000, ".", driver % 1000 / 10);
  const std::string remedy = driver == 0
                                 ? std::string("Install one")
                                 : concat("Update it, or build fastsync with CUDA ", driver / 1000,
                                          ": point CUDA_HOME at such a toolkit");
  return concat("the kernels of this build were compiled with CUDA ", major, ".",
                runtime % 1000 / 10, " and need an NVIDIA driver for CUDA ", major,
                oldest_driver(major), ", but ", found, ". ", remedy,
                ", or keep the model on the CPU");
}

std::string architecture_problem(int missing) {
  if (missing == 0) return {};
  return concat("the kernels of this build were not compiled for this GPU, whose architecture is ",
                "sm_", missing, ". Set FASTSYNC_CUDA_ARCHS=", missing,
                " and start again, which compiles them; an installed package has to be installed "
                "anew with it. Or keep the model on the CPU");
}

namespace {

// Cheap enough for every call.
std::string problem_with_kind(at::Device device) {
  if (device.is_cpu()) return {};
#ifdef FASTSYNC_WITH_CUDA
  if (device.is_cuda()) return problem_with_driver();
#endif
  return concat("this build of fastsync has no kernels for ", device,
                "; install a CUDA toolkit (nvcc) and delete the cached extension, or keep the "
                "model on the CPU");
}

}  // namespace

std::string device_problem(at::Device device) {
  std::string problem = problem_with_kind(device);
#ifdef FASTSYNC_WITH_CUDA
  if (problem.empty() && device.is_cuda() && device.has_index()) {
    const c10::DeviceGuard guard(device);
    problem = architecture_problem(kernels::missing_architecture());
  }
#endif
  return problem;
}

bool with_cuda() {
#ifdef FASTSYNC_WITH_CUDA
  return true;
#else
  return false;
#endif
}

void check_supported(at::Device device) {
  const std::string problem = problem_with_kind(device);
  FS_CHECK_VALUE(problem.empty(), problem);
}

#ifdef FASTSYNC_WITH_CUDA
// c10 knows the current stream of a device without any CUDA header.
CUstream_st* current_stream(at::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return static_cast<CUstream_st*>(guard.getStreamNativeHandle(guard.getStream(device)));
}
#endif

std::function<bool()> mark_stream(at::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream stream = guard.getStream(device);
  const auto event = std::make_shared<c10::Event>(device.type());
  event->record(stream);
  return [event, its = stream.device()] {
    try {
      const c10::DeviceGuard current(its);  // a thread that names none might wake another device
#ifdef FASTSYNC_WITH_CUDA
      const kernels::BesideCaptures lenient;
#endif
      return event->query();
    } catch (const c10::Error&) {
      return true;
    }
  };
}

}  // namespace fastsync::ops
