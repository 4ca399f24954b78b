// What the engine asks of CUDA's runtime beside launches. No torch header, like the kernels.
#pragma once

namespace fastsync::kernels {

// 1000 * major + 10 * minor, as CUDA counts.
struct CudaVersions {
  int runtime;  // that the kernels are linked with
  int driver;   // the newest that the driver serves; 0 where there is no driver
};

// Makes no CUDA context, and works with a driver that is too old.
CudaVersions cuda_versions();

// Returns the current device's architecture, such as 75, if this build has no code for it that runs
// there; else 0.
int missing_architecture();

// Lets the thread that holds one query events of the current device while another thread captures
// a graph, which such a query would otherwise break.
class BesideCaptures {
 public:
  BesideCaptures();
  ~BesideCaptures();
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  int mode_;  // the thread's own cudaStreamCaptureMode
};

}  // namespace fastsync::kernels
