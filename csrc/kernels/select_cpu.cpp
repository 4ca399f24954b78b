#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#include "select.h"

namespace fastsync::kernels {
namespace {

constexpr uint32_t kLowBits = 16;
constexpr uint32_t kLowMask = (1U << kLowBits) - 1;

uint32_t magnitude(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits & 0x7fffffffU;
}

// The bin of the `wanted`-th largest element. `wanted` becomes its place within that bin.
uint32_t find_bin(const std::vector<uint32_t>& bins, int64_t& wanted) {
  size_t bin = bins.size() - 1;
  while (bins[bin] < wanted) wanted -= bins[bin--];
  return static_cast<uint32_t>(bin);
}

struct Threshold {
  uint32_t magnitude;
  int64_t equals;  // how many elements of that very magnitude are taken
};

Threshold find_threshold(const float* values, int64_t numel, int64_t count) {
  std::vector<uint32_t> upper(1U << (31 - kLowBits));
  for (int64_t i = 0; i < numel; ++i) ++upper[magnitude(values[i]) >> kLowBits];
  const uint32_t top = find_bin(upper, count);
  std::vector<uint32_t> lower(1U << kLowBits);
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t bits = magnitude(values[i]);
    if (bits >> kLowBits == top) ++lower[bits & kLowMask];
  }
  const uint32_t bottom = find_bin(lower, count);
  return {top << kLowBits | bottom, count};
}

}  // namespace

void select_largest_cpu(const float* values, int64_t numel, int64_t count, int32_t* positions) {
  Threshold threshold = find_threshold(values, numel, count);
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t bits = magnitude(values[i]);
    if (bits < threshold.magnitude) continue;
    if (bits == threshold.magnitude && threshold.equals-- <= 0) continue;
    *positions++ = static_cast<int32_t>(i);
  }
}

void keep_finite_cpu(const float* from, float* to, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) to[i] = std::isfinite(from[i]) ? from[i] : to[i];
}

}  // namespace fastsync::kernels
