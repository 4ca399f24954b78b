// What one CUDA thread does: decode, sum and code a group of eight consecutive elements. The threads of a block of the
// format, at most a warp, find its largest magnitude together.
//
// [Note: every thread of a warp shuffles]
// Which threads have elements differs within a warp at the end of a segment, and a shuffle must be executed by all that it
// names. So a warp goes on while one of its groups is inside, and groups outside hold zeros and store nothing.
#pragma once

#include <cstdint>

#include "codec_dispatch.h"
#include "cuda_access.h"

namespace fastsync::kernels {
namespace {

constexpr int kWarp = 32;
constexpr int kGroup = 8;  // elements

// [Note: every thread of a warp shuffles]
__device__ __forceinline__ bool warp_inside(int64_t begin, int64_t numel) {
  return begin - static_cast<int>(threadIdx.x) % kWarp * kGroup < numel;
}

struct DecodeCall {
  const uint8_t* payload;
  int64_t source_bytes;
  int32_t sources;
};

// numel elements from `from` on, then zeros.
template <class T>
__device__ __forceinline__ void load_group(float (&x)[kGroup], const T* from, int numel) {
  Vec<T, kGroup> in;
  if (numel >= kGroup && aligned(from)) {
    in = load<kGroup>(from);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) in.item[i] = i < numel ? from[i] : T{};
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i) x[i] = widen(in.item[i]);
}

template <class T>
__device__ __forceinline__ void store_group(T* to, const float (&x)[kGroup], int numel) {
  Vec<T, kGroup> out;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) out.item[i] = narrow<T>(x[i]);
  if (numel >= kGroup && aligned(to)) {
    store(to, out);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (i < numel) to[i] = out.item[i];
    }
  }
}

// A group's codes, as they lie in the payload.
template <class Codec>
using Codes = Vec<typename Codec::Code,
                  kGroup * Codec::kBits / 8 / static_cast<int>(sizeof(typename Codec::Code))>;

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

template <class Codec>
__device__ __forceinline__ void decode_group(float (&x)[kGroup], const uint8_t* payload,
                                             const Place& place) {
  using Code = typename Codec::Code;
  const Codes<Codec> codes = load<sizeof(Codes<Codec>) / sizeof(Code)>(
      reinterpret_cast<const Code*>(payload + place.code));
  float factor = 1;
  if constexpr (Codec::kScaled) {
    factor = Codec::factor(*reinterpret_cast<const typename Codec::Scale*>(payload + place.scale));
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i) x[i] = decoded<Codec>(get_code<Codec>(codes, i), factor);
}

template <class Codec>
__device__ __forceinline__ void sum_group(float (&x)[kGroup], const DecodeCall& call,
                                          const Place& place) {
  decode_group<Codec>(x, call.payload, place);
#pragma unroll 2
  for (int32_t r = 1; r < call.sources; ++r) {
    float next[kGroup];
    decode_group<Codec>(next, call.payload + r * call.source_bytes, place);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) x[i] += next[i];
  }
}

// --- Coding a group ---

// Over the threads that share a block.
template <int kBlock>
__device__ __forceinline__ uint32_t largest_magnitude(const float (&x)[kGroup]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const uint32_t magnitude = magnitude_of(x[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
#pragma unroll
  for (int lanes = kBlock / kGroup / 2; lanes > 0; lanes /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffff, largest, lanes);
    largest = other > largest ? other : largest;
  }
  return largest;
}

struct Random {
  RandomKey key;
  uint32_t first;  // index of the group's first element
};

// Codes of x, and in x what they lost; a poisoned block's factor is NaN.
template <class Codec, bool kStochastic>
__device__ __forceinline__ Codes<Codec> code_elements(float (&x)[kGroup], float inverse,
                                                      float factor, const Random& random) {
  Codes<Codec> codes;
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const float y = Codec::kScaled ? x[i] * inverse : x[i];
    const Coded coded =
        code_element<Codec, kStochastic>(y, random.key, random.first + static_cast<uint32_t>(i));
    const bool poisoned = Codec::kScaled && !is_finite(factor);
    set_code<Codec>(codes, i, poisoned ? 0 : coded.code);
    x[i] = lost_of<Codec>(x[i], coded, factor);
  }
  return codes;
}

// As above; also stores codes and scale where the group is inside.
template <class Codec>
__device__ __forceinline__ void code_group(float (&x)[kGroup], uint8_t* payload, const Place& place,
                                           const Random& random, bool stochastic, bool inside) {
  float inverse = 1;
  float factor = 1;
  if constexpr (Codec::kScaled) {
    const uint32_t largest = largest_magnitude<Codec::kBlock>(x);
    const auto scale = largest < kTooLarge ? Codec::choose(largest) : Codec::kPoison;
    inverse = Codec::inverse(scale);
    factor = Codec::factor(scale);
    const bool first = threadIdx.x % (Codec::kBlock / kGroup) == 0;
    if (inside && first) {
      *reinterpret_cast<typename Codec::Scale*>(payload + place.scale) = scale;
    }
  }
  const Codes<Codec> codes = stochastic ? code_elements<Codec, true>(x, inverse, factor, random)
                                        : code_elements<Codec, false>(x, inverse, factor, random);
  if (inside) store(reinterpret_cast<typename Codec::Code*>(payload + place.code), codes);
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
