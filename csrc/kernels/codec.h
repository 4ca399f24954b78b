// Wire formats: encode scattered tensors to bytes, sum encoded chunks over ranks, decode into
// scattered tensors.
//
//   encode  payload = code(tensor * scale + residual)            residual <- what the code lost
//   reduce  result  = code(sum over sources of decode(source))   residual += what the code lost
//   decode  tensor  = sum over sources of decode(source)
//
// Elements are coded in blocks of `FormatTraits::block` consecutive elements of the flat buffer. A
// block of a scaled format has one scale of its own. Segments start at multiples of the block, so
// no block holds elements of two tensors; the tail of a segment's last block counts as zeros, and
// its residual is not touched.
//
// [Note: payload layout]
// The payload is a sequence of chunks of `chunk_numel` elements and `chunk_bytes` bytes each: what
// one rank sends to one other. Element i lies in chunk i / chunk_numel. Inside a chunk, from byte
// `section` on, come the codes of all its elements, then the scales of all its blocks. Several
// sections with formats of their own may share the chunks. Blocks that no segment covers are not
// written; bytes that are zero decode to zeros in every format.
//
//   format    code                              block  scale              error at most
//   float32   the float itself                     16  none               0
//   bfloat16  round to nearest even                16  none               |x| 2^-8
//   float16   x / 2^e to nearest even             256  one byte: e + 127  |x| 2^-11 or M 2^-39
//   float8    x / 2^e to nearest even, E4M3       256  the same           |x| 2^-4 or M 2^-17
//                                      E5M2       256  the same           |x| 2^-3 or M 2^-31
//   int8      round(x / s), -127..127             128  s in bfloat16      M / 252
//   int4      round(x / s), -7..7                  64  the same           M / 13.8
//
// A scale of 255 (one byte) or NaN (bfloat16) marks a block that is not finite. int4 stores the low
// nibble first.
//
// M is the block's largest magnitude; of two errors the larger holds, and 2^-127 where that is
// more; stochastic rounding at most doubles them (csrc/tests/test_codec_formats.cpp).
//
// e is the smallest exponent for which M / 2^e does not exceed the format's largest number; s is
// the smallest bfloat16 of which 127 (or 7) reach M. Neither 2^e nor s is below 2^-126. So only a
// block's own range decides what it can hold, nothing overflows, and gradients too small for a
// plain fp16 survive. x / s is computed as x * (1 / s), both rounded.
//
// Defined for every input:
//   * a block of zeros decodes to zeros,
//   * a block of a scaled format with a NaN or a magnitude (of a sum, too) from 2^127 = 1.7e38 on,
//     infinities among them, decodes to NaN everywhere. float32 and bfloat16: element by element,
//     as IEEE 754 has it,
//   * where an element's decoded value is not finite its residual is left as it was: it does not
//     affect a later step,
//   * every rank that decodes the same bytes gets the same bits; host and device agree on bits, a
//     NaN's spare bits aside.
//
// Arithmetic is fp32: each product, sum and conversion rounds to nearest even, never fused. Sums
// run over sources in rank order. With stochastic rounding a code is one of the two neighbours of x
// (float32 is exact anyway), with the probability that makes its expectation x: the place of x
// between them, which is first rounded to a multiple of 2^-16 (2^-12 in float16, 2^-15 in int8 and
// int4), is added to a random number of as many bits. That is a hash of `seed` and the element's
// index modulo 2^32.
//
// Raw pointers, sizes and a stream: no torch header, no allocation, no ownership. The functions
// return before a device has finished; the segment table is copied into the launch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pack.h"

namespace fastsync::kernels {

enum class Format : int32_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kFloat8E4M3 = 3,
  kFloat8E5M2 = 4,
  kInt8 = 5,
  kInt4 = 6
};

constexpr int kFormats = 7;

constexpr const char* name_of(Format format) {
  constexpr const char* kNames[kFormats] = {"fp32",     "bf16", "fp16", "fp8_e4m3",
                                            "fp8_e5m2", "int8", "int4"};
  return kNames[static_cast<int>(format)];
}

struct FormatTraits {
  int32_t block;        // elements
  int32_t bits;         // of one code
  int32_t scale_bytes;  // of one block
};

constexpr FormatTraits traits_of(Format format) {
  switch (format) {
    case Format::kFloat32:
      return {16, 32, 0};
    case Format::kBFloat16:
      return {16, 16, 0};
    case Format::kFloat16:
      return {256, 16, 1};
    case Format::kFloat8E4M3:
    case Format::kFloat8E5M2:
      return {256, 8, 1};
    case Format::kInt8:
      return {128, 8, 2};
    case Format::kInt4:
      return {64, 4, 2};
  }
  return {};
}

// Bytes of `numel` coded elements, a multiple of the block: codes, then scales.
constexpr int64_t coded_bytes(Format format, int64_t numel) {
  const FormatTraits traits = traits_of(format);
  return numel * traits.bits / 8 + numel / traits.block * traits.scale_bytes;
}

// See [Note: payload layout].
struct PayloadLayout {
  Format format;
  int64_t chunk_numel;  // a multiple of the block
  int64_t chunk_bytes;  // a multiple of 16
  int64_t section;      // a multiple of 16
};

struct Rounding {
  bool stochastic;
  uint64_t seed;  // another one for every call, or errors repeat
};

struct EncodeArgs {
  PayloadLayout layout;
  Rounding rounding;
  DType tensor_dtype;  // float32, float16 or bfloat16
  Scale scale;
};

// Segment offsets are in elements of the flat buffer, multiples of the block. A segment without
// tensor codes `fill` alone, unscaled, and leaves its residual as it is. `residual` is flat, in the
// same order, or nullptr. `payload` and `residual` are aligned to 16 bytes, in the other functions
// too; tensors may lie anywhere.
void encode_cpu(const Segment* segments, size_t count, float* residual, void* payload,
                const EncodeArgs& args);

// Sums one chunk: source r lies at received + r * layout.chunk_bytes. `result` is a chunk, and may
// be one of the sources; `residual` holds the chunk's elements, or nullptr. `first` is the chunk's
// first element in the flat buffer, for the random numbers.
struct ReduceArgs {
  PayloadLayout layout;
  Rounding rounding;
  int32_t sources;
  int64_t first;
};
void reduce_cpu(const void* received, void* result, float* residual, const ReduceArgs& args);

// Source r's whole payload lies at payload + r * source_bytes. Segments as for unpack: tensor is
// the destination.
struct DecodeArgs {
  PayloadLayout layout;
  DType tensor_dtype;
  int32_t sources;
  int64_t source_bytes;
};
void decode_cpu(const Segment* segments, size_t count, const void* payload, const DecodeArgs& args);

void encode_cuda(const Segment* segments, size_t count, float* residual, void* payload,
                 const EncodeArgs& args, CUstream_st* stream);
void reduce_cuda(const void* received, void* result, float* residual, const ReduceArgs& args,
                 CUstream_st* stream);
void decode_cuda(const Segment* segments, size_t count, const void* payload, const DecodeArgs& args,
                 CUstream_st* stream);

}  // namespace fastsync::kernels
