// The conversions of csrc/kernels/element.h against the oracle: every fp16 and bf16 number, and
// every rounding boundary.
#include <cmath>

#include "../kernels/element.h"
#include "harness.h"
#include "oracle.h"

namespace fastsync::testing {
namespace {

using kernels::BFloat16;
using kernels::bits_of;
using kernels::float_of;
using kernels::Half;

template <class T>
constexpr DType kDType = DType::kFloat16;
template <>
constexpr DType kDType<BFloat16> = DType::kBFloat16;

template <class T>
void decodes_every_number() {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const double expected = value_of_bits(kDType<T>, bits);
    const float found = kernels::widen(T{static_cast<uint16_t>(bits)});
    EXPECT(matches(DType::kFloat32, bits_of(found), expected), "bits ", bits, ": ", found,
           " instead of ", expected);
  }
}

template <class T>
void encodes_back_every_number() {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const T number{static_cast<uint16_t>(bits)};
    const uint32_t found = kernels::narrow<T>(kernels::widen(number)).bits;
    if (is_nan_bits(kDType<T>, bits)) {
      EXPECT(is_quiet_nan_bits(kDType<T>, found), "bits ", bits, " became ", found);
    } else {
      EXPECT(found == bits, "bits ", bits, " became ", found);
    }
  }
}

template <class T>
void expect_encoding(uint32_t float_bits) {
  const float value = float_of(float_bits);
  const uint32_t found = kernels::narrow<T>(value).bits;
  const double expected = rounded(value_of_bits(DType::kFloat32, float_bits), kDType<T>);
  EXPECT(matches(kDType<T>, found, expected), "float bits ", float_bits, " became ", found,
         " instead of ", expected);
  EXPECT(!std::isnan(expected) || is_quiet_nan_bits(kDType<T>, found), "a signalling NaN ", found);
}

// Around each number and each midpoint between neighbours: the float itself and the two next to it.
template <class T>
void encodes_every_boundary() {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const T low{static_cast<uint16_t>(bits)};
    const T high{static_cast<uint16_t>(bits + 1)};
    const float value = kernels::widen(low);
    // Averaging float bit patterns gives the midpoint: neighbours share an exponent or are its
    // ends.
    const float next = std::isinf(kernels::widen(high)) ? 2 * value : kernels::widen(high);
    const auto middle =
        static_cast<float>((static_cast<double>(value) + static_cast<double>(next)) / 2);
    for (const float center : {value, middle}) {
      for (int step = -2; step <= 2; ++step) {
        expect_encoding<T>(bits_of(center) + static_cast<uint32_t>(step));
      }
    }
  }
}

// A stride that is prime, so that the low bits of the floats visited vary.
template <class T>
void encodes_floats_of_every_exponent() {
  for (uint64_t bits = 0; bits <= 0xffffffff; bits += 1021) {
    expect_encoding<T>(static_cast<uint32_t>(bits));
  }
}

template <class T>
void encodes_special_floats() {
  for (const uint32_t sign : {0u, 0x80000000u}) {
    for (const uint32_t magnitude :
         {0u, 1u, 0x7fffffu, 0x800000u, 0x7f7fffffu, 0x7f800000u, 0x7f800001u, 0x7fbfffffu,
          0x7fc00000u, 0x7fffffffu, bits_of(65504.0f), bits_of(65519.99f), bits_of(65520.0f),
          bits_of(65536.0f), 0x33000000u, 0x33000001u, 0x7f7f7fffu, 0x7f7f8000u}) {
      expect_encoding<T>(sign | magnitude);
    }
  }
}

void accumulation_rounds_product_and_sum() {
  // 1 + e squared is 1 + 2e + e^2: a fused multiply-add keeps the e^2 that rounding the product
  // drops.
  const float one_and_bit = float_of(0x3f800001);
  const volatile float factor = one_and_bit;
  const float product = float_of(bits_of(factor * factor));
  const float found = kernels::accumulated<float>(-product, factor, factor);
  EXPECT(found == 0.0f, "contracted to a fused multiply-add: ", found);
}

}  // namespace
}  // namespace fastsync::testing

int main(int argc, char** argv) {
  using namespace fastsync::testing;
  const std::vector<Case> cases = {
      {"decodes_every_number/float16", decodes_every_number<Half>},
      {"decodes_every_number/bfloat16", decodes_every_number<BFloat16>},
      {"encodes_back_every_number/float16", encodes_back_every_number<Half>},
      {"encodes_back_every_number/bfloat16", encodes_back_every_number<BFloat16>},
      {"encodes_every_boundary/float16", encodes_every_boundary<Half>},
      {"encodes_every_boundary/bfloat16", encodes_every_boundary<BFloat16>},
      {"encodes_floats_of_every_exponent/float16", encodes_floats_of_every_exponent<Half>},
      {"encodes_floats_of_every_exponent/bfloat16", encodes_floats_of_every_exponent<BFloat16>},
      {"encodes_special_floats/float16", encodes_special_floats<Half>},
      {"encodes_special_floats/bfloat16", encodes_special_floats<BFloat16>},
      {"accumulation_rounds_product_and_sum", accumulation_rounds_product_and_sum},
  };
  return run_cases(cases, argc, argv);
}
