// pack and unpack on the host: one loop over the element functions, compiled once per instruction
// set.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "dispatch.h"
#include "element.h"
#include "pack.h"
#include "simd.h"

#if FS_X86_DISPATCH
#include <immintrin.h>
#define FS_F16C __attribute__((target("avx2,f16c")))
#endif

namespace fastsync::kernels {
namespace {

// dst and src are the same elements or do not overlap, which is what FS_INDEPENDENT promises:
// without it the compiler's own overlap check would send scaling in place to a scalar loop.
template <bool kAccumulate, class Dst, class Src>
struct TransferLoop {
  FS_HOST_DEVICE static void run(Dst* dst, const Src* src, int64_t numel, Compute<Dst> scale) {
    FS_INDEPENDENT
    for (int64_t i = 0; i < numel; ++i) {
      if constexpr (kAccumulate) {
        dst[i] = accumulated(dst[i], src[i], scale);
      } else {
        dst[i] = scaled<Dst>(src[i], scale);
      }
    }
  }
};

#if FS_X86_DISPATCH
// fp16 by the processor's own conversions, eight at a time: in cache four times as fast as the
// portable ones.
FS_F16C inline __m256 load8(const float* from) { return _mm256_loadu_ps(from); }
FS_F16C inline __m256 load8(const Half* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
FS_F16C inline void store8(float* to, __m256 values) { _mm256_storeu_ps(to, values); }
FS_F16C inline void store8(Half* to, __m256 values) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}

template <bool kAccumulate, class Dst, class Src>
FS_F16C void transfer_f16c(Dst* dst, const Src* src, int64_t numel, float scale) {
  const __m256 scales = _mm256_set1_ps(scale);
  int64_t i = 0;
  for (; i + 8 <= numel; i += 8) {
    const __m256 product = _mm256_mul_ps(load8(src + i), scales);
    store8(dst + i, kAccumulate ? _mm256_add_ps(load8(dst + i), product) : product);
  }
  TransferLoop<kAccumulate, Dst, Src>::run(dst + i, src + i, numel - i, scale);
}

template <class Dst, class Src>
constexpr bool kUsesF16c = (std::is_same_v<Dst, Half> && !std::is_same_v<Src, BFloat16>) ||
                           (std::is_same_v<Src, Half> && !std::is_same_v<Dst, BFloat16>);
#endif

template <bool kAccumulate, class Dst, class Src>
auto select_transfer() -> typename OnThisCpu<TransferLoop<kAccumulate, Dst, Src>>::Pointer {
#if FS_X86_DISPATCH
  if constexpr (kUsesF16c<Dst, Src>) {
    static const bool f16c = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    if (f16c) return transfer_f16c<kAccumulate, Dst, Src>;
  }
#endif
  return OnThisCpu<TransferLoop<kAccumulate, Dst, Src>>();
}

// Multiplying by 1 changes nothing but a signalling NaN, which a cast quiets anyway: only a copy
// skips it.
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
                                          static_cast<Compute<Tensor>>(transfer.scale.value));
  } else {
    convert(dst, src, segment.numel, transfer.scale.value);
  }
}

}  // namespace

void pack_cpu(const Segment* segments, size_t count, void* flat, const Transfer& transfer) {
  visit_types(transfer.flat_dtype, transfer.tensor_dtype, [&](auto dst, auto src) {
    using Flat = typename decltype(dst)::type;
    using Tensor = typename decltype(src)::type;
    for (size_t i = 0; i < count; ++i) {
      if (segments[i].numel == 0) continue;
      pack_segment<Flat, Tensor>(segments[i], static_cast<Flat*>(flat), transfer.scale.value);
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
