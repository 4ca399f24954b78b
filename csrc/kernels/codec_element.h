// Arithmetic of the wire formats, defined once for the host and for the device: the scale of a
// block, the code of one element and back, the random numbers of stochastic rounding.
//
// A codec class describes one format:
//
//   Code                        the type that holds one code (int4: the low four bits; two share a
//                               byte of the payload)
//   Scale                       the type that a block's scale is stored in; kScaled formats only
//   choose(largest)             the scale of a block whose largest magnitude has these float bits,
//                               below kTooLarge
//   kNonFinite                     the scale that makes a block decode to NaN
//   factor(scale), inverse(..)  what a decoded code is multiplied with, and an element before it is
//                               coded
//   nearest(y), random(y, r)    the code of an element already multiplied with `inverse`; r is 32
//                               random bits
//   value(code)                 the number that a code stands for
//
// All is branchless and, like element.h, free of operations with a subnormal result wherever the
// format is.
#pragma once

#include "codec.h"
#include "element.h"
#include "random.h"

// Codecs use a device's conversions of fp16 in hardware where it has them; a test may choose those
// forms on the host.
#ifndef FS_DEVICE_FORMS
#ifdef __CUDA_ARCH__
#define FS_DEVICE_FORMS 1
#else
#define FS_DEVICE_FORMS 0
#endif
#endif

namespace fastsync::kernels {

constexpr uint32_t kFloatOne = 1u << 23;  // a step of fp32's exponent field

// 2^127. Below it no format's rounding leaves the range of fp32; from it on a block of a scaled
// format is not finite.
constexpr uint32_t kTooLarge = 0x7f000000;

FS_HOST_DEVICE float quiet_nan() { return float_of(0x7fc00000); }

// A code, and the number that it stands for (times the block's factor).
struct Coded {
  uint32_t code;
  float value;
};

// --- Stochastic rounding ---

struct RandomKey {
  uint32_t before;
  uint32_t between;
};

FS_HOST_DEVICE RandomKey random_key(uint64_t seed) {
  const uint64_t z = mixed(seed);
  return {static_cast<uint32_t>(z), static_cast<uint32_t>(z >> 32)};
}

// A bijection of the index for each key: two rounds of multiply-xorshift with the constants of
// Wellons' lowbias32 hash.
FS_HOST_DEVICE uint32_t random_bits(RandomKey key, uint32_t index) {
  uint32_t x = index ^ key.before;
  x = (x ^ (x >> 16)) * 0x7feb352d;
  x ^= key.between;
  x = (x ^ (x >> 15)) * 0x846ca68b;
  return x ^ (x >> 16);
}

// Properties of a format from codec.h, as constants that device code may read.
template <Format kOwn>
struct FormatConstants {
  static constexpr Format kFormat = kOwn;
  static constexpr int kBlock = traits_of(kOwn).block;
  static constexpr int kBits = traits_of(kOwn).bits;
  static constexpr int kScaleBytes = traits_of(kOwn).scale_bytes;
};

// --- Formats without a scale ---

struct Float32Codec : FormatConstants<Format::kFloat32> {
  static constexpr bool kScaled = false;
  using Code = uint32_t;

  static FS_HOST_DEVICE Coded nearest(float y) { return {bits_of(y), y}; }
  static FS_HOST_DEVICE Coded random(float y, uint32_t) { return nearest(y); }
  static FS_HOST_DEVICE float value(uint32_t code) { return float_of(code); }
};

struct BFloat16Codec : FormatConstants<Format::kBFloat16> {
  static constexpr bool kScaled = false;
  using Code = uint16_t;

  static FS_HOST_DEVICE Coded coded(uint32_t code) { return {code, value(code)}; }
  static FS_HOST_DEVICE Coded nearest(float y) { return coded(encode_bfloat16(y).bits); }

  // Adding a random number below the unit and cutting off the fraction.
  static FS_HOST_DEVICE Coded random(float y, uint32_t r) {
    const uint32_t bits = bits_of(y);
    const uint32_t magnitude = bits & kMagnitudeMask;
    const uint32_t rounded = bits + select(magnitude < kFloatInf, r >> 16, 0);
    return coded(rounded >> 16 | select(magnitude > kFloatInf, 0x40, 0));
  }

  static FS_HOST_DEVICE float value(uint32_t code) { return float_of(code << 16); }
};

// --- Floating point with a power of two per block ---

// kLargest: the float bits of the format's largest number.
template <int kExponentBits, int kFractionBits, uint32_t kLargest>
struct MinifloatCodec {
  static constexpr bool kScaled = true;
  using Scale = uint8_t;
  static constexpr Scale kNonFinite = 255;

  // The smallest exponent that keeps the block in the format's range, but not below fp32's own:
  // what is added to the magnitude carries into its exponent where the fraction is larger than that
  // of kLargest.
  static FS_HOST_DEVICE Scale choose(uint32_t largest) {
    constexpr uint32_t kSlack = 0x7fffff - (kLargest & 0x7fffff);
    constexpr int kTop = static_cast<int>(kLargest >> 23) - 127;
    const int exponent = static_cast<int>((largest + kSlack) >> 23) - kTop;
    return static_cast<Scale>(exponent < 1 ? 1 : exponent);
  }
  static FS_HOST_DEVICE float factor(Scale scale) {
    const uint32_t bits = static_cast<uint32_t>(scale) << 23;
    return float_of(bits | select(scale == kNonFinite, 0x400000, 0));
  }
  static FS_HOST_DEVICE float inverse(Scale scale) { return float_of((254u - scale) << 23); }

  // With `magic` the spacing of floats is the format's own in y's binade (its subnormals share
  // one), so that the addition rounds, and the sum less magic counts units.
  static FS_HOST_DEVICE Coded nearest(float y) {
    const Split split(y);
    const uint32_t magic = split.binade + (static_cast<uint32_t>(kDropped) << 23);
    const float sum = float_of(split.magnitude) + float_of(magic);
    const uint32_t value = bits_of(sum - float_of(magic));
    return {split.code(bits_of(sum) - magic), float_of(value | split.sign)};
  }

  // Rounds at random, with units divided into 2^kGuard parts; adding a random number of parts and
  // cutting them off rounds.
  static FS_HOST_DEVICE Coded random(float y, uint32_t r) {
    const Split split(y);
    const uint32_t magic = split.binade + (static_cast<uint32_t>(kDropped - kGuard) << 23);
    const uint32_t parts = bits_of(float_of(split.magnitude) + float_of(magic)) - magic;
    const uint32_t units = (parts + (r >> (32 - kGuard))) >> kGuard;
    const float unit = float_of(split.binade - (static_cast<uint32_t>(kFractionBits) << 23));
    const uint32_t value = bits_of(static_cast<float>(static_cast<int32_t>(units)) * unit);
    return {split.code(units), float_of(value | split.sign)};
  }

  // Codes above the largest number's are infinity (where the fraction is zero) and NaN.
  static FS_HOST_DEVICE float value(uint32_t code) {
    const uint32_t magnitude = code & ((1u << (31 - kSignShift)) - 1);
    const uint32_t sign = code ^ magnitude;
#if FS_DEVICE_FORMS
    // fp16 differs by the bias of the exponent; where that is fp16's, so is what stands for
    // infinity and NaN.
    const uint32_t half = magnitude << (10 - kFractionBits) | sign << (kSignShift - 16);
    const uint32_t nan = kExponentBits < 5 && magnitude > kLargestCode ? 0x7e00 : 0;
    return decode(Half{static_cast<uint16_t>(half | nan)}) * float_of(kHalfRebiased);
#else
    // A subnormal 0.m is 1.m less 1.
    const bool subnormal = magnitude < (1u << kFractionBits);
    const uint32_t normal = (magnitude << kDropped) + kRebias + select(subnormal, kFloatOne, 0);
    const float number = float_of(normal) - float_of(select(subnormal, kMinBinade, 0));
    const uint32_t special = select(magnitude > kLargestCode, kFloatInf, 0);
    return float_of(bits_of(number) | special | sign << kSignShift);
#endif
  }

 private:
  static constexpr int kDropped = 23 - kFractionBits;
  static constexpr int kGuard = kDropped - 1 < 16 ? kDropped - 1 : 16;
  static constexpr int kSignShift = 31 - kExponentBits - kFractionBits;
  static constexpr uint32_t kRebias = static_cast<uint32_t>(128 - (1 << (kExponentBits - 1))) << 23;
  static constexpr uint32_t kMinBinade = kRebias + kFloatOne;  // of normal numbers
  static constexpr uint32_t kLargestCode = (kLargest - kRebias) >> kDropped;
  static constexpr uint32_t kHalfRebiased =
      kRebias - kHalfRebias + (127u << 23);  // 2^(difference of biases)

  struct Split {
    uint32_t sign;
    uint32_t magnitude;
    uint32_t binade;  // the power of two at the bottom of the magnitude's binade

    FS_HOST_DEVICE explicit Split(float y)
        : sign(bits_of(y) & ~kMagnitudeMask), magnitude(bits_of(y) & kMagnitudeMask) {
      const float power = float_of(magnitude & kFloatInf);
      const float least = float_of(kMinBinade);
      binade = bits_of(power < least ? least : power);
    }
    // `units` counts from zero, within 2^kFractionBits of them per step of the exponent field.
    FS_HOST_DEVICE uint32_t code(uint32_t units) const {
      return units + ((binade - kMinBinade) >> kDropped) + (sign >> kSignShift);
    }
  };
};

// Largest number 65504.
struct Float16Codec : FormatConstants<Format::kFloat16>, MinifloatCodec<5, 10, 0x477fe000> {
  using Code = uint16_t;

#if FS_DEVICE_FORMS
  static FS_HOST_DEVICE Coded nearest(float y) {
    const uint32_t code = encode_half(y).bits;
    return {code, value(code)};
  }
#endif
};

// Largest number 448.
struct Float8E4M3Codec : FormatConstants<Format::kFloat8E4M3>, MinifloatCodec<4, 3, 0x43e00000> {
  using Code = uint8_t;
};

// Largest number 57344.
struct Float8E5M2Codec : FormatConstants<Format::kFloat8E5M2>, MinifloatCodec<5, 2, 0x47600000> {
  using Code = uint8_t;
};

// --- Integers with a bfloat16 per block ---

template <int kLargest>
struct IntegerCodec {
  static constexpr bool kScaled = true;
  using Scale = uint16_t;
  static constexpr Scale kNonFinite = 0x7fc0;

  // The smallest normal bfloat16 whose kLargest-fold (exact in fp32) reaches `largest`. The guess
  // is rounded up from a number slightly too small, so it is right or one step below.
  static FS_HOST_DEVICE Scale choose(uint32_t largest) {
    constexpr float kBelow = static_cast<float>((1 - 1.0 / (1 << 22)) / kLargest);
    const uint32_t guess = (bits_of(float_of(largest) * kBelow) + 0xffff) >> 16;
    const bool small = float_of(guess << 16) * kLargest < float_of(largest);
    const uint32_t scale = guess + static_cast<uint32_t>(small);
    return static_cast<Scale>(scale < 0x80 ? 0x80 : scale);
  }
  static FS_HOST_DEVICE float factor(Scale scale) {
    return float_of(static_cast<uint32_t>(scale) << 16);
  }
  static FS_HOST_DEVICE float inverse(Scale scale) { return 1.0f / factor(scale); }

  // Floats between 2^23 and 2^24 are the integers.
  static FS_HOST_DEVICE Coded nearest(float y) {
    constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: its low bits are zero
    const float sum = y + kMagic;
    return {bits_of(sum), sum - kMagic};
  }

  // Floats between 256 and 512 are multiples of 2^-15.
  static FS_HOST_DEVICE Coded random(float y, uint32_t r) {
    constexpr uint32_t kMagic = 0x43c00000;  // 384
    const uint32_t parts = bits_of(y + float_of(kMagic)) - kMagic;
    const int32_t code = static_cast<int32_t>(parts + (r >> 17)) >> 15;
    return {static_cast<uint32_t>(code), static_cast<float>(code)};
  }
};

struct Int8Codec : FormatConstants<Format::kInt8>, IntegerCodec<127> {
  using Code = uint8_t;

  static FS_HOST_DEVICE float value(uint32_t code) {
    return static_cast<float>(static_cast<int8_t>(code));
  }
};

struct Int4Codec : FormatConstants<Format::kInt4>, IntegerCodec<7> {
  using Code = uint8_t;

  static FS_HOST_DEVICE float value(uint32_t code) {
    return static_cast<float>(static_cast<int32_t>((code & 15) ^ 8) - 8);
  }
};

// --- What the loops do to one element, whatever the format ---

template <class Codec, bool kStochastic>
FS_HOST_DEVICE Coded code_element(float y, RandomKey key, uint32_t index) {
  if constexpr (kStochastic) {
    return Codec::random(y, random_bits(key, index));
  } else {
    return Codec::nearest(y);
  }
}

// The part of x that is lost where `coded` travels.
template <class Codec>
FS_HOST_DEVICE float lost_of(float x, const Coded& coded, float factor) {
  return x - (Codec::kScaled ? coded.value * factor : coded.value);
}

template <class Codec>
FS_HOST_DEVICE float decoded(uint32_t code, float factor) {
  const float value = Codec::value(code);
  return Codec::kScaled ? value * factor : value;
}

// The residual: what was lost, plus the old one when kAdd.
template <bool kAdd>
FS_HOST_DEVICE float residual_of(float old, float lost) {
  return finite_or(kAdd ? old + lost : lost, old);
}

}  // namespace fastsync::kernels
