#include <cstddef>
#include <vector>

#include "element.h"
#include "select.h"

namespace fastsync::kernels {
namespace {

constexpr uint32_t kLowBits = 16;
constexpr uint32_t kLowMask = (1U << kLowBits) - 1;

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
  for (int64_t i = 0; i < numel; ++i) ++upper[magnitude_of(values[i]) >> kLowBits];
  const uint32_t top = find_bin(upper, count);
  std::vector<uint32_t> lower(1U << kLowBits);
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t bits = magnitude_of(values[i]);
    if (bits >> kLowBits == top) ++lower[bits & kLowMask];
  }
  const uint32_t bottom = find_bin(lower, count);
  return {top << kLowBits | bottom, count};
}

}  // namespace

void select_largest_cpu(const float* values, int64_t numel, int64_t count, int32_t* positions) {
  Threshold threshold = find_threshold(values, numel, count);
  for (int64_t i = 0; i < numel; ++i) {
    const uint32_t bits = magnitude_of(values[i]);
    if (bits < threshold.magnitude) continue;
    if (bits == threshold.magnitude && threshold.equals-- <= 0) continue;
    *positions++ = static_cast<int32_t>(i);
  }
}

void keep_finite_cpu(const float* from, float* to, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) to[i] = finite_or(from[i], to[i]);
}

}  // namespace fastsync::kernels
