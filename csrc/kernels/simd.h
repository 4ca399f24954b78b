// Loops on the host, compiled once per instruction set and chosen at run time.
//
// A loop is the static function `run` of a class: FS_HOST_DEVICE, so that it is inlined and
// compiled for the instruction set of the function that calls it. OnThisCpu<Loop>() is a pointer to
// the widest version that the processor executes.
#pragma once

#include "element.h"

// The iterations of the loop that follows do not depend on each other: without this promise the
// compiler checks for overlap at run time, or gives up.
#if defined(__clang__)
#define FS_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define FS_INDEPENDENT _Pragma("GCC ivdep")
#else
#define FS_INDEPENDENT
#endif

// The widest instruction set to compile for: 0 the compiler's target, 1 AVX2, 2 AVX-512. Lower it
// to test the others.
#ifndef FASTSYNC_SIMD_LEVEL
#define FASTSYNC_SIMD_LEVEL 2
#endif

#if defined(__GNUC__) && defined(__x86_64__) && FASTSYNC_SIMD_LEVEL > 0
#define FS_X86_DISPATCH 1
#define FS_AVX2 __attribute__((target("avx2")))
#ifdef __clang__
#define FS_AVX512 __attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define FS_AVX512 \
  __attribute__((target("avx2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif
#else
#define FS_X86_DISPATCH 0
#endif

namespace fastsync::kernels {

#if FS_X86_DISPATCH
enum class Isa { kBaseline, kAvx2, kAvx512 };

inline Isa detect_isa() {
  if (FASTSYNC_SIMD_LEVEL >= 2 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return Isa::kAvx512;
  }
  return __builtin_cpu_supports("avx2") ? Isa::kAvx2 : Isa::kBaseline;
}
#endif

template <class Loop, class Signature = decltype(Loop::run)>
class OnThisCpu;

template <class Loop, class... Args>
class OnThisCpu<Loop, void(Args...)> {
 public:
  using Pointer = void (*)(Args...);

  operator Pointer() const {
#if FS_X86_DISPATCH
    static const Isa isa = detect_isa();
    if (isa == Isa::kAvx512) return avx512;
    if (isa == Isa::kAvx2) return avx2;
#endif
    return baseline;
  }

 private:
  static void baseline(Args... args) { Loop::run(args...); }
#if FS_X86_DISPATCH
  FS_AVX2 static void avx2(Args... args) { Loop::run(args...); }
  FS_AVX512 static void avx512(Args... args) { Loop::run(args...); }
#endif
};

}  // namespace fastsync::kernels
