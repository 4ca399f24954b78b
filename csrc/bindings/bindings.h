// The parts of the Python bindings.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <vector>

#include "kernels/codec.h"

namespace fastsync {

// Kernels, and the code around them.
void bind_ops(pybind11::module_& m);
// Bucket specs of a plan.
void bind_specs(pybind11::module_& m);
// Groups of sharded parameters.
void bind_units(pybind11::module_& m);

// The watch for faults of other ranks.
void bind_watch(pybind11::module_& m);

// Tensors that may be undefined here, and None in Python.
using Optionals = std::vector<std::optional<at::Tensor>>;
std::vector<at::Tensor> tensors_of(const Optionals& given);
Optionals optionals_of(const std::vector<at::Tensor>& tensors);

kernels::Format format_named(const std::string& name);

}  // namespace fastsync
