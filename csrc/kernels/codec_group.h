// Work of one CUDA thread: decode, sum and code a group of eight elements. The threads of a block
// of the format, at most a warp, find its largest magnitude together.
//
// [Note: quads]
// A group is two quads of four consecutive elements, one in each half of the warp's 256: so the
// accesses of neighbouring threads lie side by side ([Note: whole sectors]). A block of 128 or 64
// elements lies in one half, and each half has blocks, and so scales, of its own; a block of 256 is
// both halves.
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
constexpr int kQuads = 2;
constexpr int kGroup = kQuad * kQuads;
constexpr int kHalf = kWarp * kQuad;  // elements between a thread's quads

// The first element of a thread's group, in a tile of which every warp has its own 256.
__device__ __forceinline__ int group_in_tile() {
  const int thread = static_cast<int>(threadIdx.x);
  return thread / kWarp * kWarp * kGroup + thread % kWarp * kQuad;
}

// [Note: every thread of a warp shuffles]
__device__ __forceinline__ bool warp_inside(int64_t begin, int64_t numel) {
  return begin - static_cast<int>(threadIdx.x) % kWarp * kQuad < numel;
}

struct DecodeCall {
  const uint8_t* payload;
  int64_t source_bytes;
  int32_t sources;
};

// The quads at `from` and a half further on, as far as they lie among the `numel` elements from
// `from` on; then zeros.
template <class T>
__device__ __forceinline__ void load_group(float (&x)[kGroup], const T* from, int numel) {
  Vec<T, kQuad> in[kQuads];
  if (numel >= kHalf + kQuad && aligned<kQuad>(from)) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) in[q] = load<kQuad>(from + q * kHalf);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int at = i / kQuad * kHalf + i % kQuad;
      in[i / kQuad].item[i % kQuad] = at < numel ? from[at] : T{};
    }
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i) x[i] = widen(in[i / kQuad].item[i % kQuad]);
}

template <class T>
__device__ __forceinline__ void store_group(T* to, const float (&x)[kGroup], int numel) {
  Vec<T, kQuad> out[kQuads];
#pragma unroll
  for (int i = 0; i < kGroup; ++i) out[i / kQuad].item[i % kQuad] = narrow<T>(x[i]);
  if (numel >= kHalf + kQuad && aligned<kQuad>(to)) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) store(to + q * kHalf, out[q]);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int at = i / kQuad * kHalf + i % kQuad;
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
  constexpr int kScales = kHalf / Codec::kBlock * Codec::kScaleBytes;
  return {place.code + quad * (kHalf * Codec::kBits / 8), place.scale + quad * kScales};
}

// `quads` of the group's, and zeros.
template <class Codec>
__device__ __forceinline__ void decode_group(float (&x)[kGroup], const uint8_t* payload,
                                             const Place& place, int quads) {
  using Code = typename Codec::Code;
  Codes<Codec> codes[kQuads] = {};
  float factor[kQuads] = {1, 1};
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    if (q >= quads) continue;
    const Place at = quad_place<Codec>(place, q);
    codes[q] =
        load<sizeof(Codes<Codec>) / sizeof(Code)>(reinterpret_cast<const Code*>(payload + at.code));
    if constexpr (Codec::kScaled) {
      factor[q] =
          Codec::factor(*reinterpret_cast<const typename Codec::Scale*>(payload + at.scale));
    }
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    x[i] = decoded<Codec>(get_code<Codec>(codes[i / kQuad], i % kQuad), factor[i / kQuad]);
  }
}

template <class Codec>
__device__ __forceinline__ void sum_group(float (&x)[kGroup], const DecodeCall& call,
                                          const Place& place, int quads) {
  decode_group<Codec>(x, call.payload, place, quads);
#pragma unroll 2
  for (int32_t r = 1; r < call.sources; ++r) {
    float next[kGroup];
    decode_group<Codec>(next, call.payload + r * call.source_bytes, place, quads);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) x[i] += next[i];
  }
}

// --- Coding a group ---

// Finds the largest magnitudes of the quads' blocks, over the threads that share them. `largest`
// holds zeros before.
template <int kBlock>
__device__ __forceinline__ void largest_magnitudes(uint32_t (&largest)[kQuads],
                                                   const float (&x)[kGroup]) {
  static_assert(kHalf % kBlock == 0 || kBlock == kQuads * kHalf, "[Note: quads]");
  constexpr bool kOneBlock = kBlock > kHalf;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    uint32_t& most = largest[kOneBlock ? 0 : i / kQuad];
    const uint32_t magnitude = magnitude_of(x[i]);
    most = magnitude > most ? magnitude : most;
  }
#pragma unroll
  for (int q = 0; q < (kOneBlock ? 1 : kQuads); ++q) {
#pragma unroll
    for (int lanes = (kOneBlock ? kHalf : kBlock) / kQuad / 2; lanes > 0; lanes /= 2) {
      const uint32_t other = __shfl_xor_sync(0xffffffff, largest[q], lanes);
      largest[q] = other > largest[q] ? other : largest[q];
    }
  }
  if (kOneBlock) largest[1] = largest[0];
}

struct Random {
  RandomKey key;
  uint32_t first;  // index of the group's first element
};

// Factors by which elements of the quads' blocks are multiplied before they are coded, and codes
// after that.
struct Factors {
  float inverse[kQuads] = {1, 1};
  float factor[kQuads] = {1, 1};
};

// Codes of x, and in x what they lost; a non-finite block's factor is NaN.
template <class Codec, bool kStochastic>
__device__ __forceinline__ void code_elements(Codes<Codec> (&codes)[kQuads], float (&x)[kGroup],
                                              const Factors& factors, const Random& random) {
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const int q = i / kQuad;
    const float y = Codec::kScaled ? x[i] * factors.inverse[q] : x[i];
    const auto index = random.first + static_cast<uint32_t>(q * kHalf + i % kQuad);
    const Coded coded = code_element<Codec, kStochastic>(y, random.key, index);
    const bool is_non_finite = Codec::kScaled && !is_finite(factors.factor[q]);
    set_code<Codec>(codes[q], i % kQuad, is_non_finite ? 0 : coded.code);
    x[i] = lost_of<Codec>(x[i], coded, factors.factor[q]);
  }
}

// Stores the scales of the blocks that begin with a quad of this thread's, of the `quads` that are
// inside.
template <class Codec>
__device__ __forceinline__ Factors scale_group(const float (&x)[kGroup], uint8_t* payload,
                                               const Place& place, int quads) {
  Factors factors;
  if constexpr (Codec::kScaled) {
    constexpr bool kOneBlock = Codec::kBlock > kHalf;
    uint32_t largest[kQuads] = {};
    largest_magnitudes<Codec::kBlock>(largest, x);
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const bool first = lane % ((kOneBlock ? kHalf : Codec::kBlock) / kQuad) == 0;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const auto scale = largest[q] < kTooLarge ? Codec::choose(largest[q]) : Codec::kNonFinite;
      factors.inverse[q] = Codec::inverse(scale);
      factors.factor[q] = Codec::factor(scale);
      if (first && q < quads && (q == 0 || !kOneBlock)) {
        const Place at = quad_place<Codec>(place, q);
        *reinterpret_cast<typename Codec::Scale*>(payload + at.scale) = scale;
      }
    }
  }
  return factors;
}

// Stores codes and scales of the first `quads`; in x stays what they lost.
template <class Codec>
__device__ __forceinline__ void code_group(float (&x)[kGroup], uint8_t* payload, const Place& place,
                                           const Random& random, bool stochastic, int quads) {
  const Factors factors = scale_group<Codec>(x, payload, place, quads);
  Codes<Codec> codes[kQuads];
  if (stochastic) {
    code_elements<Codec, true>(codes, x, factors, random);
  } else {
    code_elements<Codec, false>(codes, x, factors, random);
  }
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const Place at = quad_place<Codec>(place, q);
    if (q < quads) store(reinterpret_cast<typename Codec::Code*>(payload + at.code), codes[q]);
  }
}

// residual = lost, plus the old one when kAdd, where that is finite.
template <bool kAdd>
__device__ __forceinline__ void keep_group(float* residual, const float (&lost)[kGroup],
                                           const float (&old)[kGroup], int numel) {
  float kept[kGroup];
#pragma unroll
  for (int i = 0; i < kGroup; ++i) kept[i] = residual_of<kAdd>(old[i], lost[i]);
  store_group(residual, kept, numel);
}

}  // namespace
}  // namespace fastsync::kernels
