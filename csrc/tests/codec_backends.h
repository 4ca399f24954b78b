// The implementations of the wire formats that the tests run: the CPU's, and the CUDA kernels
// through the shim.
#pragma once

#include "codec_model.h"

namespace fastsync::testing {

inline const CodecBackend kCodecBackends[] = {
    {"cpu", kernels::encode_cpu, kernels::reduce_cpu, kernels::decode_cpu},
    {"cuda",
     [](const Segment* segments, size_t count, float* residual, void* payload,
        const EncodeArgs& args) {
       kernels::encode_cuda(segments, count, residual, payload, args, nullptr);
     },
     [](const void* received, void* result, float* residual, const ReduceArgs& args) {
       kernels::reduce_cuda(received, result, residual, args, nullptr);
     },
     [](const Segment* segments, size_t count, const void* payload, const DecodeArgs& args) {
       kernels::decode_cuda(segments, count, payload, args, nullptr);
     }},
};

}  // namespace fastsync::testing
