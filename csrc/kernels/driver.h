// Versions that decide whether the kernels can run at all. No torch header, like the kernels.
#pragma once

namespace fastsync::kernels {

// 1000 * major + 10 * minor, as CUDA counts.
struct CudaVersions {
  int runtime;  // that the kernels are linked with
  int driver;   // the newest that the driver serves; 0 where there is no driver
};

// Makes no CUDA context, and works with a driver that is too old.
CudaVersions cuda_versions();

}  // namespace fastsync::kernels
