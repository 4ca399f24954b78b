// pack and unpack on the host: one loop over the element functions, compiled once per instruction set.
#include <algorithm>
#include <cstring>

#include "dispatch.h"
#include "element.h"
#include "pack.h"

#if defined(__clang__)
#define FS_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define FS_INDEPENDENT _Pragma("GCC ivdep")
#else
#define FS_INDEPENDENT
#endif

// The widest instruction set to compile for: 0 the compiler's target, 1 AVX2, 2 AVX-512. Lower it to test the others.
#ifndef FASTSYNC_SIMD_LEVEL
#define FASTSYNC_SIMD_LEVEL 2
#endif

#if defined(__GNUC__) && defined(__x86_64__) && FASTSYNC_SIMD_LEVEL > 0
#define FS_X86_DISPATCH 1
#define FS_AVX2 __attribute__((target("avx2")))
#define FS_AVX512 \
  __attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#else
#define FS_X86_DISPATCH 0
#endif

namespace fastsync::kernels {
namespace {

// dst and src are the same elements or do not overlap, which is what FS_INDEPENDENT promises: without it the compiler's
// own overlap check would send scaling in place to a scalar loop.
template <bool kAccumulate, class Dst, class Src>
FS_HOST_DEVICE void transfer_loop(Dst* dst, const Src* src, int64_t numel, Compute<Dst> scale) {
  FS_INDEPENDENT
  for (int64_t i = 0; i < numel; ++i) {
    if constexpr (kAccumulate) {
      dst[i] = accumulated(dst[i], src[i], scale);
    } else {
      dst[i] = scaled<Dst>(src[i], scale);
    }
  }
}

template <bool kAccumulate, class Dst, class Src>
void transfer_baseline(Dst* dst, const Src* src, int64_t numel, Compute<Dst> scale) {
  transfer_loop<kAccumulate>(dst, src, numel, scale);
}

#if FS_X86_DISPATCH
enum class Isa { kBaseline, kAvx2, kAvx512 };

Isa detect_isa() {
  if (FASTSYNC_SIMD_LEVEL >= 2 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return Isa::kAvx512;
  }
  return __builtin_cpu_supports("avx2") ? Isa::kAvx2 : Isa::kBaseline;
}

template <bool kAccumulate, class Dst, class Src>
FS_AVX2 void transfer_avx2(Dst* dst, const Src* src, int64_t numel, Compute<Dst> scale) {
  transfer_loop<kAccumulate>(dst, src, numel, scale);
}

template <bool kAccumulate, class Dst, class Src>
FS_AVX512 void transfer_avx512(Dst* dst, const Src* src, int64_t numel, Compute<Dst> scale) {
  transfer_loop<kAccumulate>(dst, src, numel, scale);
}
#endif

template <bool kAccumulate, class Dst, class Src>
auto select_transfer() {
#if FS_X86_DISPATCH
  static const Isa isa = detect_isa();
  if (isa == Isa::kAvx512) return transfer_avx512<kAccumulate, Dst, Src>;
  if (isa == Isa::kAvx2) return transfer_avx2<kAccumulate, Dst, Src>;
#endif
  return transfer_baseline<kAccumulate, Dst, Src>;
}

// Multiplying by 1 changes nothing but a signalling NaN, which a cast quiets anyway: only a copy skips it.
template <class Dst, class Src>
void convert(Dst* dst, const Src* src, int64_t numel, double scale) {
  if constexpr (std::is_same_v<Dst, Src>) {
    if (scale == 1.0) {
      if (dst != src) std::memcpy(dst, src, static_cast<size_t>(numel) * sizeof(Dst));
      return;
    }
  }
  select_transfer<false, Dst, Src>()(dst, src, numel, static_cast<Compute<Dst>>(scale));
}

template <class Flat, class Tensor>
void pack_segment(const Segment& segment, Flat* flat, double scale) {
  Flat* dst = flat + segment.offset;
  if (segment.tensor == nullptr) {
    std::fill_n(dst, segment.numel, narrow<Flat>(segment.fill));
  } else {
    convert(dst, static_cast<const Tensor*>(segment.tensor), segment.numel, scale);
  }
}

template <class Tensor, class Flat>
void unpack_segment(const Segment& segment, const Flat* flat, const Transfer& transfer) {
  const auto dst = static_cast<Tensor*>(segment.tensor);
  const Flat* src = flat + segment.offset;
  if (transfer.accumulate) {
    select_transfer<true, Tensor, Flat>()(dst, src, segment.numel,
                                          static_cast<Compute<Tensor>>(transfer.scale));
  } else {
    convert(dst, src, segment.numel, transfer.scale);
  }
}

}  // namespace

void pack_cpu(const Segment* segments, size_t count, void* flat, const Transfer& transfer) {
  visit_types(transfer.flat_dtype, transfer.tensor_dtype, [&](auto dst, auto src) {
    using Flat = typename decltype(dst)::type;
    using Tensor = typename decltype(src)::type;
    for (size_t i = 0; i < count; ++i) {
      if (segments[i].numel == 0) continue;
      pack_segment<Flat, Tensor>(segments[i], static_cast<Flat*>(flat), transfer.scale);
    }
  });
}

void unpack_cpu(const Segment* segments, size_t count, const void* flat, const Transfer& transfer) {
  visit_types(transfer.tensor_dtype, transfer.flat_dtype, [&](auto dst, auto src) {
    using Tensor = typename decltype(dst)::type;
    using Flat = typename decltype(src)::type;
    for (size_t i = 0; i < count; ++i) {
      if (segments[i].numel == 0) continue;
      unpack_segment<Tensor>(segments[i], static_cast<const Flat*>(flat), transfer);
    }
  });
}

}  // namespace fastsync::kernels
