// A factor that a kernel multiplies with.
#pragma once

#include "element.h"

namespace fastsync::kernels {

struct Scale {
  FS_HOST_DEVICE Scale(double number = 1.0) : value(number) {}  // NOLINT(*-explicit-*)
  // Memory of the device that a kernel reads, so that the host need not know the number.
  FS_HOST_DEVICE explicit Scale(const double* there) : value(1.0), on_device(there) {}

  FS_HOST_DEVICE double get() const { return on_device == nullptr ? value : *on_device; }

  double value;  // 1.0 changes no element
  const double* on_device = nullptr;
};

}  // namespace fastsync::kernels
