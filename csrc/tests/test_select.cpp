// Top-k selection against a stable sort, and what error feedback keeps of non-finite values.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "../kernels/element.h"
#include "../kernels/select.h"
#include "harness.h"
#include "pack_model.h"

namespace fastsync::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Whether `a` goes before `b`: NaN, infinity, then numbers by magnitude.
bool is_larger(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && !std::isnan(b);
  return std::fabs(a) > std::fabs(b);
}

// By sorting. Of equals, the first ones.
std::vector<int32_t> largest_of(const std::vector<float>& values, int64_t count) {
  std::vector<int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return is_larger(values[static_cast<size_t>(a)], values[static_cast<size_t>(b)]);
  });
  order.resize(static_cast<size_t>(count));
  std::sort(order.begin(), order.end());
  return order;
}

void expect_selection(const std::vector<float>& values, int64_t count) {
  const auto numel = static_cast<int64_t>(values.size());
  GuardedBuffer from(DType::kFloat32, numel, 1);
  GuardedBuffer positions(DType::kFloat32, count, 1);  // as large as int32
  std::memcpy(from.data(), values.data(), values.size() * sizeof(float));
  kernels::select_largest_cpu(reinterpret_cast<const float*>(from.data()), numel, count,
                              reinterpret_cast<int32_t*>(positions.data()));
  const std::vector<int32_t> wanted = largest_of(values, count);
  for (int64_t i = 0; i < count; ++i) {
    int32_t found = -1;
    std::memcpy(&found, positions.at(i), sizeof(found));
    EXPECT(found == wanted[static_cast<size_t>(i)], "position ", i, " of ", count, " among ", numel,
           " is ", found, " instead of ", wanted[static_cast<size_t>(i)]);
  }
  positions.check_guards();
}

// One, all, and counts between them.
void expect_selections(const std::vector<float>& values) {
  const auto numel = static_cast<int64_t>(values.size());
  for (const int64_t count : {int64_t{1}, numel / 100, numel / 3, numel - 1, numel}) {
    if (count > 0) expect_selection(values, count);
  }
}

// Element `i` of so many, of every size.
template <class Make>
void expect_selections_of(const Make& make) {
  Random random;
  for (const int64_t numel : {1, 2, 3, 17, 64, 1001, 65537}) {
    std::vector<float> values(static_cast<size_t>(numel));
    for (size_t i = 0; i < values.size(); ++i) values[i] = make(random, i);
    expect_selections(values);
  }
}

float with_random_sign(Random& random, float value) {
  return std::copysign(value, random.next() % 2 == 0 ? 1.0F : -1.0F);
}

void selects_of_numbers() {
  expect_selections_of([](Random& random, size_t) {
    const auto size = static_cast<float>(random.next() % (1U << 24));
    return with_random_sign(random, std::ldexp(size, -20));
  });
}

// Any 32 bits, subnormal numbers included. All NaNs are one magnitude here: their spare bits are
// not ours.
void selects_of_any_bits() {
  expect_selections_of([](Random& random, size_t) {
    const float value = kernels::float_of(static_cast<uint32_t>(random.next()));
    return std::isnan(value) ? with_random_sign(random, kNan) : value;
  });
}

// Numbers that only the lower half of their bits tells apart: all fall into one bin of the first
// histogram.
void selects_of_neighbours() {
  expect_selections_of([](Random& random, size_t) {
    const uint32_t low = static_cast<uint32_t>(random.next()) & 0xffff;
    return with_random_sign(random, kernels::float_of(0x3f800000U | low));
  });
}

// And those that only the upper half does.
void selects_of_exponents() {
  expect_selections_of([](Random& random, size_t) {
    return with_random_sign(random, std::ldexp(1.0F, static_cast<int>(random.next() % 240) - 140));
  });
}

void takes_the_first_of_equals() {
  expect_selections_of([](Random& random, size_t) { return with_random_sign(random, 0.3F); });
  expect_selections_of([](Random& random, size_t) { return with_random_sign(random, 0.0F); });
  expect_selections_of([](Random& random, size_t) {
    return with_random_sign(random, static_cast<float>(random.next() % 4));
  });
}

void leaves_nothing_infinite_behind() {
  const float poison[] = {kInfinity, kNan, std::numeric_limits<float>::max(),
                          std::numeric_limits<float>::denorm_min()};
  expect_selections_of([&](Random& random, size_t) {
    const uint64_t choice = random.next() % 40;
    return with_random_sign(random, choice < 4 ? poison[choice] : 1.0F);
  });
  expect_selection({1.0F, -kInfinity, 2.0F, -kNan, 1e38F}, 1);  // NaN
  expect_selection({1.0F, -kInfinity, 2.0F, -kNan, 1e38F}, 2);  // and the infinity
}

void keeps_what_is_finite() {
  Random random;
  for (const int64_t numel : {0, 1, 7, 64, 1001}) {
    GuardedBuffer from(DType::kFloat32, numel, 1);
    GuardedBuffer to(DType::kFloat32, numel, 3);
    random.fill(from, DType::kFloat32, numel);
    random.fill(to, DType::kFloat32, numel);
    for (int64_t i = 0; i < numel; i += 5) {
      store_bits(DType::kFloat32, from.at(i), kernels::bits_of(i % 2 == 0 ? kInfinity : -kNan));
    }
    std::vector<uint64_t> wanted;
    for (int64_t i = 0; i < numel; ++i) {
      const double value = value_of_bits(DType::kFloat32, from.bits(i));
      wanted.push_back(std::isfinite(value) ? from.bits(i) : to.bits(i));
    }
    kernels::keep_finite_cpu(reinterpret_cast<const float*>(from.data()),
                             reinterpret_cast<float*>(to.data()), numel);
    for (int64_t i = 0; i < numel; ++i) {
      EXPECT(to.bits(i) == wanted[static_cast<size_t>(i)], "element ", i, " of ", numel,
             " has bits ", to.bits(i), " instead of ", wanted[static_cast<size_t>(i)]);
    }
    to.check_guards();
  }
}

}  // namespace
}  // namespace fastsync::testing

int main(int argc, char** argv) {
  using namespace fastsync::testing;
  const std::vector<Case> cases = {
      {"selects_of_numbers", selects_of_numbers},
      {"selects_of_any_bits", selects_of_any_bits},
      {"selects_of_neighbours", selects_of_neighbours},
      {"selects_of_exponents", selects_of_exponents},
      {"takes_the_first_of_equals", takes_the_first_of_equals},
      {"leaves_nothing_infinite_behind", leaves_nothing_infinite_behind},
      {"keeps_what_is_finite", keeps_what_is_finite},
  };
  return run_cases(cases, argc, argv);
}
