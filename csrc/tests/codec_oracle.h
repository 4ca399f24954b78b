// A slow model of the wire formats that shares nothing with csrc/kernels/codec_element.h: numbers
// are doubles, minifloats a table of all values by definition, scales are found by search.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "../kernels/codec.h"
#include "oracle.h"

namespace fastsync::testing {

using Wire = kernels::Format;
using kernels::Rounding;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

inline double fp32(double value) { return rounded(value, DType::kFloat32); }
inline uint32_t fp32_bits(double value) {
  const auto number = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return bits;
}

// The random number that codec.h and codec_element.h describe: splitmix64's finaliser of the seed,
// then two rounds of multiply-xorshift.
inline uint32_t random_number(uint64_t seed, int64_t index) {
  uint64_t key = seed + 0x9e3779b97f4a7c15u;
  key = (key ^ key >> 30) * 0xbf58476d1ce4e5b9u;
  key = (key ^ key >> 27) * 0x94d049bb133111ebu;
  key = key ^ key >> 31;
  uint64_t x = (static_cast<uint64_t>(index) ^ key) & 0xffffffff;
  x = (x ^ x >> 16) * 0x7feb352d & 0xffffffff;
  x = x ^ key >> 32;
  x = (x ^ x >> 15) * 0x846ca68b & 0xffffffff;
  return static_cast<uint32_t>(x ^ x >> 16);
}

// All numbers of a small floating-point format. With infinities, the largest exponent field holds
// them and the NaNs, as in IEEE 754; else only the code with all bits set is a NaN (OCP 8-bit
// Floating Point Specification, E4M3).
class Minifloat {
 public:
  Minifloat(int exponent_bits, int fraction_bits, bool infinities)
      : sign_(1u << (exponent_bits + fraction_bits)) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    for (uint32_t code = 0; code < sign_; ++code) {
      const auto field = static_cast<int>(code >> fraction_bits);
      const uint32_t fraction = code % (1u << fraction_bits);
      const bool last_field = field == (1 << exponent_bits) - 1;
      const double m = static_cast<double>(fraction) / (1 << fraction_bits);
      double value = field == 0 ? std::ldexp(m, 1 - bias) : std::ldexp(1 + m, field - bias);
      if (infinities && last_field) value = fraction == 0 ? HUGE_VAL : kNan;
      if (!infinities && code == sign_ - 1) value = kNan;
      values_.push_back(value);
      if (std::isfinite(value)) largest_ = code;
    }
  }

  double value(uint32_t code) const {
    const double magnitude = values_[code % sign_];
    return code & sign_ ? -magnitude : magnitude;
  }
  double largest() const { return values_[largest_]; }
  uint32_t codes() const { return 2 * sign_; }

  uint32_t nearest(double y) const {
    const uint32_t low = below(y);
    if (low == largest_) return with_sign(low, y);
    const double down = std::fabs(y) - values_[low];
    const double up = values_[low + 1] - std::fabs(y);
    const bool take_low = down < up || (down == up && low % 2 == 0);
    return with_sign(take_low ? low : low + 1, y);
  }

  // The way from one neighbour to the other in 2^bits steps: as many of the random numbers lead up.
  uint32_t stochastic(double y, uint32_t random, int bits) const {
    const uint32_t low = below(y);
    if (low == largest_) return with_sign(low, y);
    const double gap = values_[low + 1] - values_[low];
    const double way = std::nearbyint(std::ldexp((std::fabs(y) - values_[low]) / gap, bits));
    const bool up = way + std::floor(std::ldexp(random, bits - 32)) >= std::ldexp(1, bits);
    return with_sign(up ? low + 1 : low, y);
  }

  // The last code of a number that does not exceed |y|.
  uint32_t below(double y) const {
    const auto end = values_.begin() + largest_ + 1;
    return static_cast<uint32_t>(std::upper_bound(values_.begin(), end, std::fabs(y)) -
                                 values_.begin() - 1);
  }

 private:
  uint32_t with_sign(uint32_t code, double y) const {
    return std::signbit(y) ? code + sign_ : code;
  }

  uint32_t sign_;
  uint32_t largest_ = 0;
  std::vector<double> values_;
};

inline const Minifloat& minifloat_of(Wire format) {
  static const Minifloat float16(5, 10, true), e4m3(4, 3, false), e5m2(5, 2, true);
  return format == Wire::kFloat16 ? float16 : format == Wire::kFloat8E4M3 ? e4m3 : e5m2;
}

inline bool is_integer(Wire format) { return format == Wire::kInt8 || format == Wire::kInt4; }
inline bool is_scaled(Wire format) { return format != Wire::kFloat32 && format != Wire::kBFloat16; }
inline double largest_integer(Wire format) { return format == Wire::kInt8 ? 127 : 7; }

// The scale of a block without poison, as stored.
inline uint32_t scale_of(Wire format, double largest) {
  if (is_integer(format)) {
    for (uint32_t low = 0x7f, high = 0x7f7f;;) {  // low does not reach, high does
      if (high - low == 1) return high;
      const uint32_t middle = (low + high) / 2;
      const bool reaches =
          value_of_bits(DType::kBFloat16, middle) * largest_integer(format) >= largest;
      (reaches ? high : low) = middle;
    }
  }
  int exponent = -126;
  while (std::ldexp(minifloat_of(format).largest(), exponent) < largest) ++exponent;
  return static_cast<uint32_t>(exponent + 127);
}

inline double factor_of(Wire format, uint32_t scale) {
  if (is_integer(format)) return value_of_bits(DType::kBFloat16, scale);
  return scale == 255 ? kNan : scale == 0 ? 0 : std::ldexp(1, static_cast<int>(scale) - 127);
}

inline double value_of_code(Wire format, uint32_t code) {
  switch (format) {
    case Wire::kFloat32:
      return value_of_bits(DType::kFloat32, code);
    case Wire::kBFloat16:
      return value_of_bits(DType::kBFloat16, code);
    case Wire::kInt8:
      return code < 128 ? code : static_cast<double>(code) - 256;
    case Wire::kInt4:
      return code < 8 ? code : static_cast<double>(code) - 16;
    default:
      return minifloat_of(format).value(code);
  }
}

inline double decoded(Wire format, uint32_t code, uint32_t scale) {
  const double value = value_of_code(format, code);
  return is_scaled(format) ? fp32(value * factor_of(format, scale)) : value;
}

inline uint32_t code_bfloat16(double x, const Rounding& rounding, uint32_t random) {
  if (!std::isfinite(x) || !rounding.stochastic) {
    const uint32_t bits = fp32_bits(rounded(x, DType::kBFloat16));
    return std::isnan(x) ? 0x7fc0 : bits >> 16;
  }
  return static_cast<uint32_t>((uint64_t{fp32_bits(x)} + (random >> 16)) >> 16);
}

inline uint32_t code_integer(Wire format, double y, const Rounding& rounding, uint32_t random) {
  const uint32_t mask = format == Wire::kInt8 ? 0xff : 0xf;
  double code = std::nearbyint(y);
  if (rounding.stochastic) {
    code = std::floor((std::nearbyint(y * 32768) + (random >> 17)) / 32768);
  }
  return static_cast<uint32_t>(static_cast<int32_t>(code)) & mask;
}

// The code of x, already divided by its block's scale in a scaled format.
inline uint32_t code_of(Wire format, double y, const Rounding& rounding, int64_t index) {
  const uint32_t random = random_number(rounding.seed, index);
  if (format == Wire::kFloat32) return fp32_bits(y);
  if (format == Wire::kBFloat16) return code_bfloat16(y, rounding, random);
  if (is_integer(format)) return code_integer(format, y, rounding, random);
  const Minifloat& numbers = minifloat_of(format);
  if (!rounding.stochastic) return numbers.nearest(y);
  return numbers.stochastic(y, random, format == Wire::kFloat16 ? 12 : 16);
}

inline double quotient(Wire format, double x, uint32_t scale) {
  const double factor = factor_of(format, scale);
  return is_integer(format) ? fp32(x * fp32(1 / factor)) : x / factor;
}

struct CodedBlock {
  std::vector<uint32_t> codes;
  uint32_t scale = 0;
  bool is_non_finite = false;
};

// `x` holds floats; `first` is the index of x[0].
inline CodedBlock code_block(Wire format, const std::vector<double>& x, const Rounding& rounding,
                             int64_t first) {
  CodedBlock block;
  double largest = 0;
  for (const double value : x) {
    largest = std::max(largest, std::fabs(value));
    block.is_non_finite |= is_scaled(format) && !(std::fabs(value) < std::ldexp(1, 127));
  }
  if (block.is_non_finite) {
    block.scale = is_integer(format) ? 0x7fc0 : 255;
    block.codes.assign(x.size(), 0);
    return block;
  }
  if (is_scaled(format)) block.scale = scale_of(format, largest);
  for (const double value : x) {
    const double y = is_scaled(format) ? quotient(format, value, block.scale) : value;
    const auto index = first + static_cast<int64_t>(block.codes.size());
    block.codes.push_back(code_of(format, y, rounding, index));
  }
  return block;
}

}  // namespace fastsync::testing
