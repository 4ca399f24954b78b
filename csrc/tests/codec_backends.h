// The implementations of the wire formats that the tests run: the CPU's, and the CUDA kernels through the shim.
#pragma once

#include "codec_model.h"

namespace fastsync::testing {

inline const CodecBackend kCodecBackends[] = {
    {"cpu", kernels::encode_cpu, kernels::reduce_cpu, kernels::decode_cpu},
};

}  // namespace fastsync::testing
