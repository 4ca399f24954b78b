// What Python brings: communication hooks, and a c10d backend.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "hook.h"

namespace fastsync::comm {

// `hook(state, bucket) -> torch.futures.Future[torch.Tensor]`, as register_comm_hook takes it.
Hook make_python_hook(pybind11::object state, pybind11::object hook);

// A c10d backend that moves tensors by functions written in Python.
void bind_host_backend(pybind11::module_& m);

}  // namespace fastsync::comm
