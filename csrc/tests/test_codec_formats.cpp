// Promises of the wire formats: every code's value, bounds of the error, error feedback, unbiased
// stochastic rounding.
#include <cmath>
#include <utility>

#include "codec_backends.h"
#include "codec_model.h"

namespace fastsync::testing {
namespace {

constexpr std::pair<Wire, const char*> kFormats[] = {
    {Wire::kFloat32, "float32"}, {Wire::kBFloat16, "bfloat16"}, {Wire::kFloat16, "float16"},
    {Wire::kFloat8E4M3, "e4m3"}, {Wire::kFloat8E5M2, "e5m2"},   {Wire::kInt8, "int8"},
    {Wire::kInt4, "int4"},
};

// One tensor on a payload of one chunk.
class OneTensor {
 public:
  OneTensor(const CodecBackend& backend, Wire format, int64_t numel)
      : backend_(backend),
        layout_(layout_of(format, (numel + block_of(format) - 1) / block_of(format), 0)),
        numel_(numel),
        wire_(layout_, 1),
        tensor_(DType::kFloat32, layout_.chunk_numel, 0),
        residual_(DType::kFloat32, layout_.chunk_numel, 0) {}

  WireBuffer& payload() { return wire_; }
  int64_t numel() const { return numel_; }

  std::vector<float> encode(const std::vector<float>& values, const Rounding& rounding) {
    std::memcpy(tensor_.data(), values.data(), values.size() * 4);
    const Segment segment{tensor_.data(), 0, numel_, 0};
    backend_.encode(&segment, 1, nullptr, wire_.data(), {layout_, rounding, DType::kFloat32, 1.0f});
    return decode();
  }

  // Replaces `residual` by the new one.
  std::vector<float> encode(const std::vector<float>& values, std::vector<float>& residual,
                            const Rounding& rounding) {
    std::memcpy(tensor_.data(), values.data(), values.size() * 4);
    std::memcpy(residual_.data(), residual.data(), residual.size() * 4);
    const Segment segment{tensor_.data(), 0, numel_, 0};
    backend_.encode(&segment, 1, reinterpret_cast<float*>(residual_.data()), wire_.data(),
                    {layout_, rounding, DType::kFloat32, 1.0f});
    std::memcpy(residual.data(), residual_.data(), residual.size() * 4);
    return decode();
  }

  std::vector<float> decode() {
    std::vector<float> result(static_cast<size_t>(numel_));
    const Segment segment{tensor_.data(), 0, numel_, 0};
    backend_.decode(&segment, 1, wire_.data(), {layout_, DType::kFloat32, 1, 0});
    std::memcpy(result.data(), tensor_.data(), result.size() * 4);
    return result;
  }

 private:
  const CodecBackend& backend_;
  PayloadLayout layout_;
  int64_t numel_;
  WireBuffer wire_;
  GuardedBuffer tensor_;
  GuardedBuffer residual_;
};

uint32_t codes_in(Wire format) { return 1u << kernels::traits_of(format).bits; }

// --- Every code ---

// Every code, next to several scales: the zero byte, one, the limits, poison.
void decodes_every_code(const CodecBackend& backend, Wire format) {
  if (format == Wire::kFloat32) return;  // 2^32 codes; test_codec.cpp decodes numbers of all kinds
  const auto codes = static_cast<int64_t>(codes_in(format));
  const bool integer = is_integer(format);
  for (const uint32_t scale :
       {0u, 1u, 127u, 240u, 255u, 0x80u, 0x3f80u, 0x3f81u, 0x7e00u, 0x7fc0u}) {
    if (!integer && scale > 255) continue;
    OneTensor tensor(backend, format, std::max(codes, block_of(format)));
    for (int64_t i = 0; i < tensor.numel(); ++i) {
      tensor.payload().set_code(i, static_cast<uint32_t>(i % codes));
      if (i % block_of(format) == 0) tensor.payload().set_scale(i, scale);
    }
    const std::vector<float> found = tensor.decode();
    for (int64_t i = 0; i < tensor.numel(); ++i) {
      const auto code = static_cast<uint32_t>(i % codes);
      EXPECT(matches(DType::kFloat32, kernels::bits_of(found[size_t(i)]),
                     decoded(format, code, scale)),
             "code ", code, " at scale ", scale, " is ", found[size_t(i)]);
    }
  }
}

// Each finite number of the format, next to the largest one, survives: the block's scale is 1 (or
// 2^12).
void encodes_every_number_exactly(const CodecBackend& backend, Wire format) {
  if (format == Wire::kFloat32) return;
  for (const float unit : {1.0f, 4096.0f}) {
    std::vector<float> numbers;
    float largest = 0;
    for (uint32_t code = 0; code < codes_in(format); ++code) {
      const auto value = static_cast<float>(value_of_code(format, code));
      if (!std::isfinite(value) || (is_integer(format) && value < -largest_integer(format)))
        continue;
      largest = std::max(largest, std::isfinite(value * unit) ? value * unit : 0);
      if (std::isfinite(value * unit)) numbers.push_back(value * unit);
    }
    std::vector<float> values;
    for (const float number : numbers) {
      if (values.size() % size_t(block_of(format)) == 0) values.push_back(largest);
      values.push_back(number);
    }
    OneTensor tensor(backend, format, static_cast<int64_t>(values.size()));
    for (const bool stochastic : {false, true}) {
      const std::vector<float> found = tensor.encode(values, {stochastic, 5});
      for (size_t i = 0; i < values.size(); ++i) {
        const float wanted = is_integer(format) ? values[i] + 0.0f : values[i];  // no -0
        EXPECT(kernels::bits_of(found[i]) == kernels::bits_of(wanted), values[i], " became ",
               found[i]);
      }
    }
  }
}

// --- Bounds ---

// A bound as codec.h states it: at most `relative` of the element or `block` of the block's largest
// magnitude.
struct Bound {
  double relative;
  double block;
};

Bound bound_of(Wire format) {
  switch (format) {
    case Wire::kFloat32:
      return {0, 0};
    case Wire::kBFloat16:
      return {std::ldexp(1, -8), 0};
    case Wire::kFloat16:
      return {std::ldexp(1, -11), std::ldexp(1, -39)};
    case Wire::kFloat8E4M3:
      return {std::ldexp(1, -4), std::ldexp(1, -17)};
    case Wire::kFloat8E5M2:
      return {std::ldexp(1, -3), std::ldexp(1, -31)};
    case Wire::kInt8:
      return {0, 1.0 / 252};
    case Wire::kInt4:
      return {0, 1.0 / 13.8};
  }
  return {};
}

// Largest magnitudes on both sides of each power of two and of each step of the scale, with
// elements at the worst places.
std::vector<float> adversarial_block(Wire format, int index, Numbers& numbers) {
  const double powers[] = {std::ldexp(1, -100), 1e-8, 1.0, 7.0, 127.0, 448.0, 65504.0, 9e37};
  const double nudges[] = {1,          1 - 0x1p-24, 1 + 0x1p-23, 1 + 0x1p-8,
                           1 + 0x1p-7, 1.0079,      1.75,        1.751};
  const double largest = fp32(powers[index % 8] * nudges[index / 8 % 8]);
  const CodedBlock block = code_block(format, {largest}, {false, 0}, 0);
  std::vector<float> values = {static_cast<float>(largest)};
  while (values.size() < size_t(block_of(format))) {
    double value = numbers.uniform() * largest;
    if (is_integer(format)) {  // halfway between two codes
      const double step = std::floor(numbers.uniform() * largest_integer(format));
      value = (step + 0.5) * factor_of(format, block.scale);
    } else if (is_scaled(format)) {
      const Minifloat& table = minifloat_of(format);
      const uint32_t code = table.below(numbers.uniform() * std::ldexp(largest, index % 40 - 39) /
                                        factor_of(format, block.scale));
      value = (table.value(code) + table.value(code + 1)) / 2 * factor_of(format, block.scale);
    } else {  // next to halfway between the first two bfloat16 of a binade
      value = std::ldexp(1 + 0x1p-8 + numbers.sign() * 0x1p-20, index % 40 - 120);
    }
    values.push_back(static_cast<float>(std::min(value, largest) * numbers.sign()));
  }
  return values;
}

// Also the share of the bound that is reached, so that it says something.
void keeps_the_bound(const CodecBackend& backend, Wire format) {
  const Bound bound = bound_of(format);
  Numbers numbers;
  for (const bool stochastic : {false, true}) {
    const int times = stochastic ? 2 : 1;
    double worst = 0;
    for (int index = 0; index < 640; ++index) {
      const std::vector<float> values = adversarial_block(format, index, numbers);
      OneTensor tensor(backend, format, static_cast<int64_t>(values.size()));
      const std::vector<float> found = tensor.encode(values, {stochastic, uint64_t(index)});
      for (size_t i = 0; i < values.size(); ++i) {
        const double x = static_cast<double>(values[i]);
        const double allowed = times * std::max(bound.relative * std::fabs(x),
                                                bound.block * static_cast<double>(values[0]));
        const double error = std::fabs(static_cast<double>(found[i]) - x);
        EXPECT(error <= allowed, values[i], " next to ", values[0], " became ", found[i]);
        if (allowed > 0) worst = std::max(worst, error / allowed);
      }
    }
    EXPECT(format == Wire::kFloat32 || worst > 0.88, "at most ", worst, " of the bound is reached");
  }
}

// Below the smallest scale the bound is absolute.
void keeps_the_bound_of_tiny_blocks(const CodecBackend& backend, Wire format) {
  Numbers numbers;
  for (int exponent = -149; exponent < -100; ++exponent) {
    std::vector<float> values;
    for (int64_t i = 0; i < block_of(format); ++i) {
      values.push_back(
          static_cast<float>(numbers.sign() * std::ldexp(numbers.uniform(), exponent)));
    }
    OneTensor tensor(backend, format, static_cast<int64_t>(values.size()));
    const std::vector<float> found = tensor.encode(values, {false, 0});
    const double largest = std::ldexp(1, exponent);
    const Bound bound = bound_of(format);
    const double allowed = std::max((bound.relative + bound.block) * largest,
                                    std::ldexp(1, is_integer(format) ? -127 : -134));
    for (size_t i = 0; i < values.size(); ++i) {
      const double error =
          std::fabs(static_cast<double>(found[i]) - static_cast<double>(values[i]));
      EXPECT(error <= allowed, values[i], " in a block below 2^", exponent, " became ", found[i]);
    }
  }
}

// --- Error feedback ---

// value + old residual = decoded + new residual, but for the roundings of that sum and of what was
// lost.
void loses_nothing_to_the_residual(const CodecBackend& backend, Wire format) {
  Numbers numbers;
  OneTensor tensor(backend, format, 3000);
  std::vector<float> residual(3000, 0.0f);
  for (uint64_t step = 0; step < 20; ++step) {
    std::vector<float> values;
    for (int i = 0; i < 3000; ++i)
      values.push_back(static_cast<float>(numbers.sign() * numbers.uniform()));
    const std::vector<float> old = residual;
    const std::vector<float> found = tensor.encode(values, residual, {step % 2 == 1, step});
    for (size_t i = 0; i < values.size(); ++i) {
      const double before = static_cast<double>(values[i]) + static_cast<double>(old[i]);
      const double after = static_cast<double>(found[i]) + static_cast<double>(residual[i]);
      const double largest = std::fabs(before) + std::fabs(static_cast<double>(found[i]));
      EXPECT(std::fabs(before - after) <= std::ldexp(largest, -24), "step ", step, ": ", before,
             " became ", after);
    }
  }
}

// In the long run the sum of what is sent is the sum of what was to be sent, however coarse the
// format.
void residual_brings_small_gradients_through(const CodecBackend& backend, Wire format) {
  std::vector<float> values(static_cast<size_t>(block_of(format)), 1e-4f);
  values[0] = 1;
  OneTensor tensor(backend, format, block_of(format));
  std::vector<float> residual(values.size(), 0.0f);
  double sum = 0;
  constexpr int kSteps = 4000;
  for (int step = 0; step < kSteps; ++step) {
    sum += static_cast<double>(tensor.encode(values, residual, {false, 0})[1]);
  }
  const double wanted = kSteps * static_cast<double>(values[1]);
  const double left = static_cast<double>(residual[1]);
  EXPECT(std::fabs(sum + left - wanted) < 1e-4 * wanted && std::fabs(left) < 0.08, "sent ", sum,
         " and kept ", left, " of ", wanted);
}

void poison_leaves_the_residual(const CodecBackend& backend, Wire format) {
  for (const float bad : {NAN, HUGE_VALF, -HUGE_VALF}) {
    OneTensor tensor(backend, format, 3 * 256);
    std::vector<float> values(3 * 256, 0.3f), residual(3 * 256, 0.125f);
    values[300] = bad;
    const std::vector<float> found = tensor.encode(values, residual, {false, 0});
    const auto block = static_cast<size_t>(is_scaled(format) ? block_of(format) : 1);
    for (size_t i = 0; i < values.size(); ++i) {
      const bool is_non_finite = i / block == 300 / block;
      EXPECT(std::isfinite(found[i]) != is_non_finite, "element ", i, " next to ", bad, ": ",
             found[i]);
      EXPECT((residual[i] == 0.125f) == is_non_finite, "residual ", i, ": ", residual[i]);
    }
  }
}

// --- Stochastic rounding ---

struct Moments {
  double error = 0;      // mean
  double deviation = 0;  // of that mean, if the rounding is as it should be
  double neighbour = 0;  // correlation with the next element's error
};

// Errors of one value in many places, next to 1 as each block's largest magnitude.
Moments errors_of(const CodecBackend& backend, Wire format, float value, uint64_t seed) {
  constexpr int64_t kNumel = 256 * 1024;
  std::vector<float> values(kNumel, value);
  for (size_t i = 0; i < values.size(); i += size_t(block_of(format))) values[i] = 1;
  OneTensor tensor(backend, format, kNumel);
  const std::vector<float> found = tensor.encode(values, {true, seed});
  std::vector<double> errors;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] != 1)
      errors.push_back(static_cast<double>(found[i]) - static_cast<double>(value));
  }
  const auto [low, high] = std::minmax_element(errors.begin(), errors.end());
  const auto count = static_cast<double>(errors.size());
  Moments moments;
  for (size_t i = 0; i < errors.size(); ++i) {
    EXPECT(errors[i] == *low || errors[i] == *high, "three different roundings of ", value);
    moments.error += errors[i] / count;
    moments.neighbour += errors[i] * errors[(i + 1) % errors.size()] / count;
  }
  moments.deviation = std::sqrt(-*low * *high / count);  // of a variable with two values and mean 0
  moments.neighbour /= std::max(-*low * *high, 1e-300);
  return moments;
}

void stochastic_rounding_is_unbiased(const CodecBackend& backend, Wire format) {
  if (format == Wire::kFloat32) return;
  for (const float value : {0.3f, -0.77777f, 0.011f, 0.9f, -0.5001f}) {
    for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{2}, ~uint64_t{0}}) {
      const Moments moments = errors_of(backend, format, value, seed);
      EXPECT(std::fabs(moments.error) <= 5 * moments.deviation, "mean error of ", value, ": ",
             moments.error, " with a deviation of ", moments.deviation);
      EXPECT(std::fabs(moments.neighbour) < 5.0 / 512, "correlation ", moments.neighbour);
    }
  }
}

// The same element under many seeds, as in training.
void stochastic_rounding_is_unbiased_over_seeds(const CodecBackend& backend, Wire format) {
  if (format == Wire::kFloat32) return;
  const auto numel = static_cast<size_t>(block_of(format));
  std::vector<float> values(numel, 0.3f);
  values[0] = 1;
  OneTensor tensor(backend, format, block_of(format));
  constexpr int kSeeds = 4000;
  std::vector<double> sums(numel), squares(numel);
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const std::vector<float> found = tensor.encode(values, {true, seed});
    for (size_t i = 1; i < numel; ++i) {
      const double error = static_cast<double>(found[i]) - static_cast<double>(values[i]);
      sums[i] += error;
      squares[i] += error * error;
    }
  }
  for (size_t i = 1; i < numel; ++i) {
    EXPECT(squares[i] > 0, "element ", i, " is never rounded");
    EXPECT(std::fabs(sums[i]) <= 5 * std::sqrt(squares[i]), "element ", i, " errs by ",
           sums[i] / kSeeds, " on average");
  }
}

}  // namespace
}  // namespace fastsync::testing

int main(int argc, char** argv) {
  using namespace fastsync::testing;
  std::vector<Case> cases;
  for (const CodecBackend& backend : kCodecBackends) {
    for (const auto& [format, format_name] : kFormats) {
      const auto add = [&, format = format, name = format_name](const char* test, auto function) {
        cases.push_back({fastsync::concat(backend.name, "/", test, "/", name),
                         [&backend, function, format] { function(backend, format); }});
      };
      add("decodes_every_code", decodes_every_code);
      add("encodes_every_number_exactly", encodes_every_number_exactly);
      add("keeps_the_bound", keeps_the_bound);
      add("keeps_the_bound_of_tiny_blocks", keeps_the_bound_of_tiny_blocks);
      add("loses_nothing_to_the_residual", loses_nothing_to_the_residual);
      add("residual_brings_small_gradients_through", residual_brings_small_gradients_through);
      add("poison_leaves_the_residual", poison_leaves_the_residual);
      add("stochastic_rounding_is_unbiased", stochastic_rounding_is_unbiased);
      add("stochastic_rounding_is_unbiased_over_seeds", stochastic_rounding_is_unbiased_over_seeds);
    }
  }
  return run_cases(cases, argc, argv);
}
