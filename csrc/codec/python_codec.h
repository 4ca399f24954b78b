// Codecs written in Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "coder.h"

namespace fastsync::engine {

// `codec` has encode(values, payload) and decode(payload, values), as fastsync.Codec describes
// them.
std::shared_ptr<Codec> make_python_codec(pybind11::object codec);

}  // namespace fastsync::engine
