// Multi-tensor pack and unpack between scattered tensors and one flat buffer.
//
//   pack    flat[offset + i] = cast(tensor[i] * scale)         for every segment
//   unpack  tensor[i]        = cast(flat[offset + i] * scale)  plus the old tensor[i]
//                                                              if `accumulate`
//
// pack writes cast(fill) for a segment without a tensor.
//
// Arithmetic is done in fp32 (fp64 when both sides are fp64): the product, the sum and the
// narrowing cast each round to nearest even, never fused, so that hosts and devices agree. NaN (its
// spare bits aside) and infinities pass through; what exceeds a narrow type's range becomes
// infinity. `tensor` and `flat` may be the same memory at the same element (scaling in place) when
// both types are equal; otherwise they must not overlap. Any alignment and any length, 0 included,
// is valid: 16-byte accesses are used where both sides allow them.
//
// Raw pointers, sizes and a stream: no torch header, no allocation, no ownership. The functions
// return before a device has finished; the segment table is copied into the launch, so the caller
// may free it at once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "scale.h"

struct CUstream_st;  // cudaStream_t without a CUDA header

namespace fastsync::kernels {

enum class DType : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kFloat64 = 3 };

constexpr size_t element_size(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// One contiguous run of the flat buffer and the tensor memory that it exchanges elements with.
struct Segment {
  void* tensor;    // pack: source, or nullptr to write `fill`. unpack: destination, never nullptr.
  int64_t offset;  // first element of the run in the flat buffer
  int64_t numel;   // elements in the run
  float fill;      // pack only: the value written when `tensor` is nullptr (not scaled)
};

struct Transfer {
  DType tensor_dtype;
  DType flat_dtype;
  Scale scale;
  bool accumulate;  // unpack only
};

// fp64 exchanges with fp64 only; fp32, fp16 and bf16 in any combination. Throws
// std::invalid_argument otherwise.
void pack_cpu(const Segment* segments, size_t count, void* flat, const Transfer& transfer);
void unpack_cpu(const Segment* segments, size_t count, const void* flat, const Transfer& transfer);

// Launched on the current device; one launch serves up to a table's capacity of segments. Throws
// std::runtime_error with CUDA's own text when a launch is refused.
void pack_cuda(const Segment* segments, size_t count, void* flat, const Transfer& transfer,
               CUstream_st* stream);
void unpack_cuda(const Segment* segments, size_t count, const void* flat, const Transfer& transfer,
                 CUstream_st* stream);

}  // namespace fastsync::kernels
