// Communication hooks written in Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "hook.h"

namespace fastsync::comm {

// `hook(state, bucket) -> torch.futures.Future[torch.Tensor]`, as register_comm_hook takes it.
std::unique_ptr<Hook> make_python_hook(pybind11::object state, pybind11::object hook);

}  // namespace fastsync::comm
