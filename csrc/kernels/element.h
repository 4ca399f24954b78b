// Element types and their arithmetic, defined once for the host and for the device.
//
//   Compute<T>                   the type for arithmetic on T: double for double, else float
//   widen(x)                     T -> Compute<T>, exact
//   narrow<T>(x)                 Compute<T> -> T, round to nearest even; NaN becomes a quiet NaN
//   scaled<Dst>(x, s)            narrow(widen(x) * s)
//   accumulated<Dst>(old, x, s)  narrow(widen(old) + widen(x) * s), product and sum each rounded
//
// The host forms are branchless (every path is computed, then selected), so that a plain loop over
// them vectorises. They use no operation with a subnormal result, so they are right under
// flush-to-zero too. A compiler that contracts a * b + c to a fused multiply-add would make ranks
// with different hardware disagree: build with -ffp-contract=off (host) and -fmad=false (nvcc).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define FS_HOST_DEVICE __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define FS_HOST_DEVICE inline __attribute__((always_inline))
#else
#define FS_HOST_DEVICE inline
#endif

namespace fastsync::kernels {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

template <class T>
struct ComputeType {
  using type = float;
};
template <>
struct ComputeType<double> {
  using type = double;
};
template <class T>
using Compute = typename ComputeType<T>::type;

FS_HOST_DEVICE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

FS_HOST_DEVICE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// A ?: of computed values, in a form that no compiler turns into a branch: a branch would keep the
// loop from vectorising.
FS_HOST_DEVICE uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return no ^ ((yes ^ no) & mask);
}

constexpr uint32_t kFloatInf = 0x7f800000;  // every larger magnitude is a NaN
constexpr uint32_t kMagnitudeMask = 0x7fffffff;

// Magnitudes of floats compare like the integers that hold their bits; a NaN is above infinity.
FS_HOST_DEVICE uint32_t magnitude_of(float value) { return bits_of(value) & kMagnitudeMask; }

FS_HOST_DEVICE bool is_finite(float value) { return magnitude_of(value) < kFloatInf; }
FS_HOST_DEVICE bool is_finite(Half value) { return (value.bits & 0x7c00u) != 0x7c00u; }
FS_HOST_DEVICE bool is_finite(BFloat16 value) { return (value.bits & 0x7f80u) != 0x7f80u; }
FS_HOST_DEVICE bool is_finite(double value) { return value - value == 0.0; }

// The new residual of error feedback: `wanted` if that is finite. Other values must not affect a
// later step.
FS_HOST_DEVICE float finite_or(float wanted, float old) {
#ifdef __CUDA_ARCH__
  return is_finite(wanted) ? wanted : old;
#else
  return float_of(select(is_finite(wanted), bits_of(wanted), bits_of(old)));
#endif
}

constexpr uint32_t kHalfRebias =
    112 << 23;  // fp32's exponent bias less fp16's, in the fp32 exponent field

FS_HOST_DEVICE float decode(Half half) {
#ifdef __CUDA_ARCH__
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half.bits));
  return value;
#else
  const uint32_t magnitude = half.bits & 0x7fffu;
  const uint32_t sign = (half.bits & 0x8000u) << 16;
  const uint32_t normal = (magnitude << 13) + kHalfRebias;
  const uint32_t special = normal + kHalfRebias;  // exponent 31 becomes 255
  // 1.m * 2^-14 less 2^-14 leaves the subnormal 0.m * 2^-14 exactly.
  const uint32_t one = 1u << 23;
  const uint32_t subnormal = bits_of(float_of(normal + one) - float_of(kHalfRebias + one));
  const uint32_t finite = select(magnitude < 0x400, subnormal, normal);
  return float_of(sign | select(magnitude < 0x7c00, finite, special));
#endif
}

FS_HOST_DEVICE Half encode_half(float value) {
#ifdef __CUDA_ARCH__
  Half half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(value));
  return half;
#else
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & kMagnitudeMask;
  const uint32_t sign = (bits >> 16) & 0x8000;
  // Adding half of the dropped unit, less one unless the kept part is odd, rounds to nearest even;
  // a carry out of the fraction steps the exponent, up to infinity.
  const uint32_t normal = (magnitude - kHalfRebias + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // The spacing of floats at 0.5 is fp16's smallest subnormal, so this addition does the rounding.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const uint32_t finite = select(magnitude < (113u << 23), subnormal, normal);
  const uint32_t special = select(magnitude > kFloatInf, 0x7e00, 0x7c00);
  return {static_cast<uint16_t>(sign | select(magnitude < (143u << 23), finite, special))};
#endif
}

FS_HOST_DEVICE BFloat16 encode_bfloat16(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  BFloat16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
#else
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40;  // rounding up could carry a NaN to infinity or zero
  return {static_cast<uint16_t>(select((bits & kMagnitudeMask) > kFloatInf, quiet, rounded))};
#endif
}

FS_HOST_DEVICE float widen(float value) { return value; }
FS_HOST_DEVICE double widen(double value) { return value; }
FS_HOST_DEVICE float widen(Half value) { return decode(value); }
FS_HOST_DEVICE float widen(BFloat16 value) {
  return float_of(static_cast<uint32_t>(value.bits) << 16);
}

FS_HOST_DEVICE void narrow_to(float value, float& out) { out = value; }
FS_HOST_DEVICE void narrow_to(double value, double& out) { out = value; }
FS_HOST_DEVICE void narrow_to(float value, Half& out) { out = encode_half(value); }
FS_HOST_DEVICE void narrow_to(float value, BFloat16& out) { out = encode_bfloat16(value); }

template <class Dst>
FS_HOST_DEVICE Dst narrow(Compute<Dst> value) {
  Dst out;
  narrow_to(value, out);
  return out;
}

template <class Dst, class Src>
FS_HOST_DEVICE Dst scaled(Src value, Compute<Dst> scale) {
  return narrow<Dst>(widen(value) * scale);
}

template <class Dst, class Src>
FS_HOST_DEVICE Dst accumulated(Dst old, Src value, Compute<Dst> scale) {
  return narrow<Dst>(widen(old) + widen(value) * scale);
}

}  // namespace fastsync::kernels
