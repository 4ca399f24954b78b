#include <algorithm>

#include "dispatch.h"
#include "element.h"
#include "norm.h"
#include "simd.h"

namespace fastsync::kernels {
namespace {

// Partial sums: enough that additions need not wait for each other, on any instruction set.
constexpr int64_t kLanes = 16;

template <class T>
struct SquareLoop {
  FS_HOST_DEVICE static void run(const T* data, int64_t numel, double* sum) {
    double lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= numel; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) add(lanes[lane], data[i + lane]);
    }
    for (int64_t lane = 0; i + lane < numel; ++lane) add(lanes[lane], data[i + lane]);
    *sum = 0.0;
    for (const double lane : lanes) *sum += lane;
  }

 private:
  FS_HOST_DEVICE static void add(double& lane, T element) {
    const double value = widen(element);
    lane += value * value;
  }
};

template <class T>
struct FiniteLoop {
  FS_HOST_DEVICE static void run(const T* data, int64_t numel, uint32_t* bad) {
    uint32_t found = 0;
    for (int64_t i = 0; i < numel; ++i) found |= static_cast<uint32_t>(!is_finite(data[i]));
    *bad = found;
  }
};

template <class Visit>
void visit_type(DType dtype, const Visit& visit) {
  if (!visit_float_type(dtype, visit)) visit(TypeTag<double>{});
}

}  // namespace

double square_sum_cpu(const void* data, DType dtype, int64_t numel) {
  double sum = 0.0;
  visit_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const typename OnThisCpu<SquareLoop<T>>::Pointer loop = OnThisCpu<SquareLoop<T>>();
    for (int64_t begin = 0; begin < numel; begin += kSquareBlock) {
      double block = 0.0;
      loop(static_cast<const T*>(data) + begin, std::min(kSquareBlock, numel - begin), &block);
      sum += block;
    }
  });
  return sum;
}

bool all_finite_cpu(const void* data, DType dtype, int64_t numel) {
  uint32_t bad = 0;
  visit_type(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const typename OnThisCpu<FiniteLoop<T>>::Pointer loop = OnThisCpu<FiniteLoop<T>>();
    loop(static_cast<const T*>(data), numel, &bad);
  });
  return bad == 0;
}

}  // namespace fastsync::kernels
