// Encode, reduce and decode on at::Tensors: checks, dtype and device dispatch, and the stream, in
// front of `kernels/codec.h`.
//
// Pointers leave tensors only for the length of one call, as in ops.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "../kernels/codec.h"
#include "items.h"
#include "ops.h"

namespace fastsync::ops {

// Facts about a bucket's payload that both sides know.
struct CodePlan {
  kernels::PayloadLayout layout;
  int64_t numel = 0;  // elements of the flat buffer, a multiple of layout.chunk_numel
  bool stochastic = false;
};

// A flat buffer of `numel` elements, a multiple of the block, that travels as one chunk.
CodePlan one_chunk(kernels::Format format, int64_t numel);

struct Encoding {
  Scale scale;
  uint64_t seed = 0;  // of stochastic rounding
  // The payload holds, for every chunk, that of each of so many sources, and this one writes its
  // own.
  int32_t sources = 1;
  int32_t source = 0;
  // Only these elements of the flat buffer, multiples of the block.
  int64_t begin = 0;
  int64_t end = std::numeric_limits<int64_t>::max();
};

// payload = code(tensor * scale + residual) for every item; the residual takes what was lost.
// `residual` is fp32 [numel] or undefined, `payload` uint8 [numel / chunk_numel * sources *
// chunk_bytes].
void encode(const std::vector<Item>& items, const at::Tensor& residual, const at::Tensor& payload,
            const CodePlan& plan, const Encoding& how);

// result = code(sum of chunks), where `received` holds one chunk from each rank, in rank order, and
// `result` is one. `residual` is fp32 [chunk_numel] or undefined; `first` is the chunk's first
// element in the flat buffer.
void reduce(const at::Tensor& received, const at::Tensor& result, const at::Tensor& residual,
            const CodePlan& plan, int64_t first, uint64_t seed);

// tensor = decoded average for every item. `sources` is 1 where the payload holds finished chunks
// one after the other; else it holds, for every chunk, that of each source in rank order, and they
// are summed. Only elements in [begin, end) of the flat buffer, multiples of the block, are
// written; tensors must then be in their slots' order.
void decode(const std::vector<Item>& items, const at::Tensor& payload, const CodePlan& plan,
            int32_t sources, int64_t begin, int64_t end);

// The average of equally sized tensors, one per rank, as it comes out of coded buckets: in the
// gather form rounded once, else once more as an average. Simulates any number of ranks in one
// process; fp32.
at::Tensor wire_average(const std::vector<at::Tensor>& tensors, kernels::Format format,
                        bool gather);

}  // namespace fastsync::ops
