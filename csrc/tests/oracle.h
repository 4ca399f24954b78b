// A slow model of the element types that shares nothing with csrc/kernels/element.h: values are
// doubles, rounding is to a multiple of a power of two, and every intermediate is exact or rounded
// once.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "../kernels/pack.h"

namespace fastsync::testing {

using kernels::DType;

struct Format {
  int exponent_bits;
  int fraction_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int min_exponent() const { return 1 - bias(); }
};

inline Format format_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return {5, 10};
    case DType::kBFloat16:
      return {8, 7};
    case DType::kFloat32:
      return {8, 23};
    default:
      return {11, 52};
  }
}

// `value` rounded to the nearest number of the format, ties to even, beyond the largest to
// infinity.
inline double rounded(double value, DType dtype) {
  if (dtype == DType::kFloat64 || value == 0 || !std::isfinite(value)) return value;
  const Format format = format_of(dtype);
  int exponent = std::ilogb(value);
  if (exponent < format.min_exponent()) exponent = format.min_exponent();
  const int unit = exponent - format.fraction_bits;
  const double result = std::ldexp(std::nearbyint(std::ldexp(value, -unit)), unit);
  if (result != 0 && std::ilogb(result) > format.bias()) {
    return std::copysign(std::numeric_limits<double>::infinity(), value);
  }
  return result;
}

inline uint64_t load_bits(DType dtype, const void* from) {
  uint64_t bits = 0;  // the low bytes come first on every machine that CUDA runs on
  std::memcpy(&bits, from, kernels::element_size(dtype));
  return bits;
}

inline void store_bits(DType dtype, void* to, uint64_t bits) {
  std::memcpy(to, &bits, kernels::element_size(dtype));
}

inline double value_of_bits(DType dtype, uint64_t bits) {
  const Format format = format_of(dtype);
  const uint64_t fraction = bits & ((uint64_t{1} << format.fraction_bits) - 1);
  const int max_field = (1 << format.exponent_bits) - 1;
  const int field = static_cast<int>(bits >> format.fraction_bits) & max_field;
  const bool negative = (bits >> (format.fraction_bits + format.exponent_bits)) & 1;
  double magnitude;
  if (field == max_field) {
    magnitude = fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                              : std::numeric_limits<double>::infinity();
  } else if (field == 0) {
    magnitude =
        std::ldexp(static_cast<double>(fraction), format.min_exponent() - format.fraction_bits);
  } else {
    const uint64_t significand = fraction | (uint64_t{1} << format.fraction_bits);
    magnitude =
        std::ldexp(static_cast<double>(significand), field - format.bias() - format.fraction_bits);
  }
  return negative ? -magnitude : magnitude;
}

inline bool is_nan_bits(DType dtype, uint64_t bits) {
  return std::isnan(value_of_bits(dtype, bits));
}

inline bool is_quiet_nan_bits(DType dtype, uint64_t bits) {
  return is_nan_bits(dtype, bits) && ((bits >> (format_of(dtype).fraction_bits - 1)) & 1);
}

// Whether `bits` is `expected`: the same number and sign of zero, or any NaN for a NaN.
inline bool matches(DType dtype, uint64_t bits, double expected) {
  const double value = value_of_bits(dtype, bits);
  if (std::isnan(expected)) return std::isnan(value);
  return value == expected && std::signbit(value) == std::signbit(expected);
}

// Products and sums of two floats rounded from double are correctly rounded: 53 bits exceed 2 * 24
// + 2.
inline double multiplied(double a, double b, DType compute) { return rounded(a * b, compute); }
inline double added(double a, double b, DType compute) { return rounded(a + b, compute); }

}  // namespace fastsync::testing
