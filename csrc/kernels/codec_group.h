// Work of one CUDA thread: decode, sum and code a group of elements: 16, or 8 of a format without
// scales. The threads whose groups make up a block find its largest magnitude together.
//
// [Note: quads]
// A group is a few quads of four consecutive elements, and between two quads of a thread lies one
// of each of the threads beside it: so the accesses of neighbouring threads lie side by side
// ([Note: whole sectors]), and yet all quads of a thread are in one block, or in two of 64
// elements. What a block's scale costs is paid once for them.
//
// [Note: every thread of a warp shuffles]
// Which threads have elements differs within a warp at the end of a segment, and a shuffle must be
// executed by all that it names. So a warp goes on while one of its quads is inside, and quads
// outside hold zeros and store nothing.
#pragma once

#include <cstdint>

#include "codec_dispatch.h"
#include "cuda_access.h"

namespace fastsync::kernels {
namespace {

constexpr int kWarp = 32;
constexpr int kQuad = 4;  // elements

// [Note: quads]
template <class Codec>
struct Shape {
  static constexpr int kQuads = Codec::kScaled ? 4 : 2;
  static constexpr int kGroup = kQuad * kQuads;  // elements
  // Blocks that a group has quads of.
  static constexpr int kBlocks = Codec::kScaled && Codec::kBlock < 128 ? 128 / Codec::kBlock : 1;
  static constexpr int kQuadsPerBlock = kQuads / kBlocks;
  // Threads whose groups make up those blocks.
  static constexpr int kLanes = Codec::kScaled ? Codec::kBlock * kBlocks / kGroup : kWarp;
  static constexpr int kStride = kLanes * kQuad;  // elements from quad to quad
  static_assert(kWarp % kLanes == 0 && kQuads % kBlocks == 0, "[Note: quads]");
};

// The first element of a group, of those that threads from number 0 on have.
template <class Codec>
__device__ __forceinline__ int group_in_tile(int thread) {
  using S = Shape<Codec>;
  return thread / S::kLanes * S::kLanes * S::kGroup + thread % S::kLanes * kQuad;
}

// The elements of a group.
template <class Codec>
using Group = float[Shape<Codec>::kGroup];

// [Note: every thread of a warp shuffles]
template <class Codec>
__device__ __forceinline__ bool warp_inside(int64_t begin, int64_t numel) {
  return begin - group_in_tile<Codec>(static_cast<int>(threadIdx.x) % kWarp) < numel;
}

// How many quads of a group that begins `left` elements before the end lie in front of it.
template <class Codec>
__device__ __forceinline__ int quads_inside(int64_t left) {
  using S = Shape<Codec>;
  if (left <= 0) return 0;
  if (left > (S::kQuads - 1) * S::kStride) return S::kQuads;
  return (static_cast<int>(left) + S::kStride - 1) / S::kStride;
}

// Whether a group that begins `left` elements before the end is whole.
template <class Codec>
__device__ __forceinline__ bool group_inside(int64_t left) {
  return left >= (Shape<Codec>::kQuads - 1) * Shape<Codec>::kStride + kQuad;
}

// Where element i of a group lies, counted from the first.
template <class Codec>
__device__ __forceinline__ constexpr int element_at(int i) {
  return i / kQuad * Shape<Codec>::kStride + i % kQuad;
}

struct DecodeCall {
  const uint8_t* payload;
  int64_t source_bytes;
  int32_t sources;
};

// The quads of a group at `from`, as far as they lie among the `numel` elements from there on; then
// zeros.
template <class Codec, class T>
__device__ __forceinline__ void load_group(Group<Codec>& x, const T* from, int numel) {
  Vec<T, kQuad> in[Shape<Codec>::kQuads];
  if (group_inside<Codec>(numel) && aligned<kQuad>(from)) {
#pragma unroll
    for (int q = 0; q < Shape<Codec>::kQuads; ++q)
      in[q] = load<kQuad>(from + q * Shape<Codec>::kStride);
  } else {
#pragma unroll
    for (int i = 0; i < Shape<Codec>::kGroup; ++i) {
      const int at = element_at<Codec>(i);
      in[i / kQuad].item[i % kQuad] = at < numel ? from[at] : T{};
    }
  }
#pragma unroll
  for (int i = 0; i < Shape<Codec>::kGroup; ++i) x[i] = widen(in[i / kQuad].item[i % kQuad]);
}

template <class Codec, class T>
__device__ __forceinline__ void store_group(T* to, const Group<Codec>& x, int numel) {
  Vec<T, kQuad> out[Shape<Codec>::kQuads];
#pragma unroll
  for (int i = 0; i < Shape<Codec>::kGroup; ++i) out[i / kQuad].item[i % kQuad] = narrow<T>(x[i]);
  if (group_inside<Codec>(numel) && aligned<kQuad>(to)) {
#pragma unroll
    for (int q = 0; q < Shape<Codec>::kQuads; ++q) store(to + q * Shape<Codec>::kStride, out[q]);
  } else {
#pragma unroll
    for (int i = 0; i < Shape<Codec>::kGroup; ++i) {
      const int at = element_at<Codec>(i);
      if (at < numel) to[at] = out[i / kQuad].item[i % kQuad];
    }
  }
}

// A quad's codes, as they lie in the payload.
template <class Codec>
using Codes = Vec<typename Codec::Code,
                  kQuad * Codec::kBits / 8 / static_cast<int>(sizeof(typename Codec::Code))>;

template <class Codec>
__device__ __forceinline__ void set_code(Codes<Codec>& codes, int i, uint32_t code) {
  if constexpr (Codec::kFormat != Format::kInt4) {
    codes.item[i] = static_cast<typename Codec::Code>(code);
  } else if (i % 2 == 0) {
    codes.item[i / 2] = static_cast<uint8_t>(code & 15);
  } else {
    codes.item[i / 2] |= static_cast<uint8_t>(code << 4);
  }
}

template <class Codec>
__device__ __forceinline__ uint32_t get_code(const Codes<Codec>& codes, int i) {
  if constexpr (Codec::kFormat != Format::kInt4) {
    return codes.item[i];
  } else {
    return codes.item[i / 2] >> (i % 2 * 4) & 15;
  }
}

// The place of a quad, of the group whose first quad is at `place`.
template <class Codec>
__device__ __forceinline__ Place quad_place(const Place& place, int quad) {
  using S = Shape<Codec>;
  return {place.code + quad * (S::kStride * Codec::kBits / 8),
          place.scale + quad / S::kQuadsPerBlock * Codec::kScaleBytes};
}

// `quads` of the group's, and zeros.
template <class Codec>
__device__ __forceinline__ void decode_group(Group<Codec>& x, const uint8_t* payload,
                                             const Place& place, int quads) {
  using S = Shape<Codec>;
  using Code = typename Codec::Code;
  Codes<Codec> codes[Shape<Codec>::kQuads] = {};
  float factor[S::kBlocks] = {};
#pragma unroll
  for (int q = 0; q < Shape<Codec>::kQuads; ++q) {
    const Place at = quad_place<Codec>(place, q);
    if (q >= quads) continue;
    codes[q] =
        load<sizeof(Codes<Codec>) / sizeof(Code)>(reinterpret_cast<const Code*>(payload + at.code));
    if constexpr (Codec::kScaled) {
      if (q % S::kQuadsPerBlock > 0) continue;
      factor[q / S::kQuadsPerBlock] =
          Codec::factor(*reinterpret_cast<const typename Codec::Scale*>(payload + at.scale));
    }
  }
#pragma unroll
  for (int i = 0; i < Shape<Codec>::kGroup; ++i) {
    const int q = i / kQuad;
    x[i] = decoded<Codec>(get_code<Codec>(codes[q], i % kQuad), factor[q / S::kQuadsPerBlock]);
  }
}

template <class Codec>
__device__ __forceinline__ void sum_group(Group<Codec>& x, const DecodeCall& call,
                                          const Place& place, int quads) {
  decode_group<Codec>(x, call.payload, place, quads);
#pragma unroll 2
  for (int32_t r = 1; r < call.sources; ++r) {
    Group<Codec> next;
    decode_group<Codec>(next, call.payload + r * call.source_bytes, place, quads);
#pragma unroll
    for (int i = 0; i < Shape<Codec>::kGroup; ++i) x[i] += next[i];
  }
}

// --- Coding a group ---

// Finds the largest magnitudes of the group's blocks, with the threads that share them.
template <class Codec>
__device__ __forceinline__ void largest_magnitudes(uint32_t (&largest)[Shape<Codec>::kBlocks],
                                                   const Group<Codec>& x) {
  constexpr int kPerBlock = Shape<Codec>::kGroup / Shape<Codec>::kBlocks;
#pragma unroll
  for (int b = 0; b < Shape<Codec>::kBlocks; ++b) {
    uint32_t most = 0;
#pragma unroll
    for (int i = b * kPerBlock; i < (b + 1) * kPerBlock; ++i) {
      const uint32_t magnitude = magnitude_of(x[i]);
      most = magnitude > most ? magnitude : most;
    }
#pragma unroll
    for (int lanes = Shape<Codec>::kLanes / 2; lanes > 0; lanes /= 2) {
      const uint32_t other = __shfl_xor_sync(0xffffffff, most, lanes);
      most = other > most ? other : most;
    }
    largest[b] = most;
  }
}

struct GroupRounding {
  bool stochastic;
  RandomKey key;
  uint32_t first;  // index of the group's first element
};

// Factors by which elements of the group's blocks are multiplied before they are coded, and codes
// after that.
template <class Codec>
struct Factors {
  float inverse[Shape<Codec>::kBlocks];
  float factor[Shape<Codec>::kBlocks];
};

// A non-finite block's factor is NaN, and its codes are zeros.
template <class Codec, bool kStochastic>
__device__ __forceinline__ void code_elements(Codes<Codec> (&codes)[Shape<Codec>::kQuads],
                                              const Group<Codec>& x, const Factors<Codec>& factors,
                                              const GroupRounding& rounding) {
#pragma unroll
  for (int i = 0; i < Shape<Codec>::kGroup; ++i) {
    const int q = i / kQuad;
    const int block = q / Shape<Codec>::kQuadsPerBlock;
    const float y = Codec::kScaled ? x[i] * factors.inverse[block] : x[i];
    const auto index = rounding.first + static_cast<uint32_t>(element_at<Codec>(i));
    const Coded coded = code_element<Codec, kStochastic>(y, rounding.key, index);
    const bool is_non_finite = Codec::kScaled && !is_finite(factors.factor[block]);
    set_code<Codec>(codes[q], i % kQuad, is_non_finite ? 0 : coded.code);
  }
}

// Stores the scales of the blocks that begin with a quad of this thread's, of the `quads` that are
// inside.
template <class Codec>
__device__ __forceinline__ Factors<Codec> scale_group(const Group<Codec>& x, uint8_t* payload,
                                                      const Place& place, int quads) {
  using S = Shape<Codec>;
  Factors<Codec> factors;
  if constexpr (Codec::kScaled) {
    uint32_t largest[S::kBlocks];
    largest_magnitudes<Codec>(largest, x);
    const bool first = static_cast<int>(threadIdx.x) % S::kLanes == 0;
#pragma unroll
    for (int b = 0; b < S::kBlocks; ++b) {
      const auto scale = largest[b] < kTooLarge ? Codec::choose(largest[b]) : Codec::kNonFinite;
      factors.inverse[b] = Codec::inverse(scale);
      factors.factor[b] = Codec::factor(scale);
      if (first && b * S::kQuadsPerBlock < quads) {
        const Place at = quad_place<Codec>(place, b * S::kQuadsPerBlock);
        *reinterpret_cast<typename Codec::Scale*>(payload + at.scale) = scale;
      }
    }
  } else {
    factors.inverse[0] = factors.factor[0] = 1;
  }
  return factors;
}

// Stores codes and scales of the first `quads`; in x stays what they lost, if that is `kept`.
template <class Codec>
__device__ __forceinline__ void code_group(Group<Codec>& x, uint8_t* payload, const Place& place,
                                           int quads, const GroupRounding& rounding, bool kept) {
  const Factors<Codec> factors = scale_group<Codec>(x, payload, place, quads);
  Codes<Codec> codes[Shape<Codec>::kQuads];
  if (rounding.stochastic) {
    code_elements<Codec, true>(codes, x, factors, rounding);
  } else {
    code_elements<Codec, false>(codes, x, factors, rounding);
  }
#pragma unroll
  for (int q = 0; q < Shape<Codec>::kQuads; ++q) {
    const Place at = quad_place<Codec>(place, q);
    if (q < quads) store(reinterpret_cast<typename Codec::Code*>(payload + at.code), codes[q]);
  }
  if (!kept) return;
#pragma unroll
  for (int i = 0; i < Shape<Codec>::kGroup; ++i) {
    const int q = i / kQuad;
    const uint32_t code = get_code<Codec>(codes[q], i % kQuad);
    const float factor = factors.factor[q / Shape<Codec>::kQuadsPerBlock];
    x[i] = lost_of<Codec>(x[i], {code, Codec::value(code)}, factor);
  }
}

// residual = lost, plus the old one when kAdd, where that is finite.
template <class Codec, bool kAdd>
__device__ __forceinline__ void keep_group(float* residual, const Group<Codec>& lost,
                                           const Group<Codec>& old, int numel) {
  Group<Codec> kept;
#pragma unroll
  for (int i = 0; i < Shape<Codec>::kGroup; ++i) kept[i] = residual_of<kAdd>(old[i], lost[i]);
  store_group<Codec>(residual, kept, numel);
}

}  // namespace
}  // namespace fastsync::kernels
