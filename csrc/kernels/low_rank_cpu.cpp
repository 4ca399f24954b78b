#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "element.h"
#include "low_rank.h"
#include "random.h"

namespace fastsync::kernels {
namespace {

constexpr int64_t kLanes = 8;
constexpr int64_t kTile = 512;  // columns whose sums stay in the first-level cache

double dot(const float* a, const float* b, int64_t numel) {
  std::array<double, kLanes> sums{};
  int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sums[static_cast<size_t>(lane)] +=
          static_cast<double>(a[i + lane]) * static_cast<double>(b[i + lane]);
    }
  }
  double sum = 0;
  for (const double part : sums) sum += part;
  for (; i < numel; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

double norm(const float* vector, int64_t numel) { return std::sqrt(dot(vector, vector, numel)); }

// Takes the parts along the first `count` of `vectors` out of `vector`. Returns the length that is left.
double project_out(const float* vectors, int64_t count, int64_t numel, float* vector) {
  for (int pass = 0; pass < 2; ++pass) {
    for (int64_t k = 0; k < count; ++k) {
      const float* other = vectors + k * numel;
      const double along = dot(other, vector, numel);
      for (int64_t i = 0; i < numel; ++i) {
        vector[i] = static_cast<float>(static_cast<double>(vector[i]) -
                                       along * static_cast<double>(other[i]));
      }
    }
  }
  return norm(vector, numel);
}

// Scales `vector` to length one. False: it depends on the vectors before it. What is not finite counts as independent.
bool normalise(const float* before, int64_t count, int64_t numel, float* vector) {
  const double length = norm(vector, numel);
  const double left = project_out(before, count, numel, vector);
  if (std::isfinite(length) && left <= kDependent * length) return false;
  for (int64_t i = 0; i < numel; ++i) {
    vector[i] = static_cast<float>(static_cast<double>(vector[i]) / left);
  }
  return true;
}

}  // namespace

void orthonormalise_cpu(float* vectors, int64_t count, int64_t numel, const float* refill) {
  for (int64_t k = 0; k < count; ++k) {
    float* vector = vectors + k * numel;
    const float* other = refill == nullptr ? nullptr : refill + k * numel;
    if (other != nullptr && !std::isfinite(norm(vector, numel))) {
      std::copy(other, other + numel, vector);
    }
    if (normalise(vectors, k, numel, vector)) continue;
    if (other != nullptr) {
      std::copy(other, other + numel, vector);
      if (normalise(vectors, k, numel, vector)) continue;
    }
    std::fill(vector, vector + numel, 0.0F);
  }
}

void fill_random(float* values, int64_t numel, uint64_t seed) {
  const uint64_t start = mixed(seed);
  for (int64_t i = 0; i < numel; ++i) values[i] = random_value(start, i);
}

void low_rank_product_cpu(const LowRankArgs& args, int64_t begin, int64_t end, float* matrix,
                          float* residual) {
  std::array<float, kTile> sums{};
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t first = 0; first < args.cols; first += kTile) {
      const int64_t width = std::min(kTile, args.cols - first);
      std::fill(sums.begin(), sums.end(), 0.0F);
      for (int64_t k = 0; k < args.rank; ++k) {
        const float factor = args.left[k * args.rows + row];
        const float* right = args.right + k * args.cols + first;
        for (int64_t i = 0; i < width; ++i) sums[static_cast<size_t>(i)] += factor * right[i];
      }
      float* out = matrix + row * args.cols + first;
      if (residual != nullptr) {
        float* kept = residual + row * args.cols + first;
        for (int64_t i = 0; i < width; ++i) {
          kept[i] = finite_or(out[i] - args.share * sums[static_cast<size_t>(i)], kept[i]);
        }
      }
      std::copy(sums.begin(), sums.begin() + width, out);
    }
  }
}

}  // namespace fastsync::kernels
