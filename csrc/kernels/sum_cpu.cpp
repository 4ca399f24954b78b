#include <algorithm>
#include <array>

#include "dispatch.h"
#include "simd.h"
#include "sum.h"

namespace fastsync::kernels {
namespace {

// Elements whose sums stay in a core's first cache.
constexpr int64_t kBlock = 1024;

template <class T>
struct WidenLoop {
  FS_HOST_DEVICE static void run(Compute<T>* sums, const T* from, int64_t numel) {
    FS_INDEPENDENT
    for (int64_t i = 0; i < numel; ++i) sums[i] = widen(from[i]);
  }
};

template <class T>
struct AddLoop {
  FS_HOST_DEVICE static void run(Compute<T>* sums, const T* from, int64_t numel) {
    FS_INDEPENDENT
    for (int64_t i = 0; i < numel; ++i) sums[i] = sums[i] + widen(from[i]);
  }
};

template <class T>
struct NarrowLoop {
  FS_HOST_DEVICE static void run(T* to, const Compute<T>* sums, int64_t numel) {
    FS_INDEPENDENT
    for (int64_t i = 0; i < numel; ++i) to[i] = narrow<T>(sums[i]);
  }
};

template <class T>
struct PairLoop {
  FS_HOST_DEVICE static void run(T* first, T* second, int64_t numel) {
    FS_INDEPENDENT
    for (int64_t i = 0; i < numel; ++i) {
      const T sum = narrow<T>(widen(first[i]) + widen(second[i]));
      first[i] = sum;
      second[i] = sum;
    }
  }
};

template <class T>
void sum_block(T* const* to, size_t copies, const T* const* from, size_t count, int64_t begin,
               int64_t numel) {
  static const typename OnThisCpu<WidenLoop<T>>::Pointer start = OnThisCpu<WidenLoop<T>>();
  static const typename OnThisCpu<AddLoop<T>>::Pointer add = OnThisCpu<AddLoop<T>>();
  static const typename OnThisCpu<NarrowLoop<T>>::Pointer store = OnThisCpu<NarrowLoop<T>>();
  std::array<Compute<T>, kBlock> sums;  // NOLINT: start() writes what is read
  start(sums.data(), from[0] + begin, numel);
  for (size_t r = 1; r < count; ++r) add(sums.data(), from[r] + begin, numel);
  for (size_t r = 0; r < copies; ++r) store(to[r] + begin, sums.data(), numel);
}

template <class T>
void sum_to_all(void* const* buffers, size_t count, int64_t begin, int64_t end) {
  const auto typed = reinterpret_cast<T* const*>(buffers);
  if (count == 2) {
    static const typename OnThisCpu<PairLoop<T>>::Pointer pair = OnThisCpu<PairLoop<T>>();
    return pair(typed[0] + begin, typed[1] + begin, end - begin);
  }
  for (int64_t i = begin; i < end; i += kBlock) {
    sum_block<T>(typed, count, typed, count, i, std::min(kBlock, end - i));
  }
}

template <class T>
void sum(void* to, const void* const* from, size_t count, int64_t numel) {
  T* const sums = static_cast<T*>(to);
  const auto terms = reinterpret_cast<const T* const*>(from);
  for (int64_t i = 0; i < numel; i += kBlock) {
    sum_block<T>(&sums, 1, terms, count, i, std::min(kBlock, numel - i));
  }
}

}  // namespace

void sum_cpu(void* to, const void* const* from, size_t count, int64_t numel, DType dtype) {
  if (count == 0) return;
  if (dtype == DType::kFloat64) return sum<double>(to, from, count, numel);
  visit_float_type(dtype,
                   [&](auto tag) { sum<typename decltype(tag)::type>(to, from, count, numel); });
}

void sum_to_all_cpu(void* const* buffers, size_t count, int64_t begin, int64_t end, DType dtype) {
  if (count == 0) return;
  if (dtype == DType::kFloat64) return sum_to_all<double>(buffers, count, begin, end);
  visit_float_type(dtype, [&](auto tag) {
    sum_to_all<typename decltype(tag)::type>(buffers, count, begin, end);
  });
}

}  // namespace fastsync::kernels
