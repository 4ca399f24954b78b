// A c10d backend that moves tensors by functions written in Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fastsync::comm {

void bind_host_backend(pybind11::module_& m);

}  // namespace fastsync::comm
