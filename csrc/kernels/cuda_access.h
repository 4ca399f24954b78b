// Memory accesses of CUDA kernels: several elements at once, in as few and as wide instructions as there are.
#pragma once

#include <cstdint>
#include <cstring>

namespace fastsync::kernels {

constexpr int kAccessBytes = 16;

template <class T, int kCount>
struct Vec {
  T item[kCount];
};

__device__ __forceinline__ bool aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kAccessBytes == 0;
}

// The type of one access to (part of) a Vec. A struct of small members may be moved by several narrow accesses.
template <int kBytes>
struct Access {
  static_assert(kBytes % kAccessBytes == 0, "a Vec of 4, 8 or a multiple of 16 bytes");
  using Type = uint4;
};
template <>
struct Access<8> {
  using Type = uint2;
};
template <>
struct Access<4> {
  using Type = unsigned;
};

template <int kCount, class T>
__device__ __forceinline__ Vec<T, kCount> load(const T* from) {
  Vec<T, kCount> vec;
  if constexpr (kCount == 1) {
    vec.item[0] = *from;
  } else {
    using Raw = typename Access<sizeof vec>::Type;
    Raw raw[sizeof vec / sizeof(Raw)];
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof vec / sizeof(Raw)); ++i) {
      raw[i] = reinterpret_cast<const Raw*>(from)[i];
    }
    memcpy(&vec, raw, sizeof vec);
  }
  return vec;
}

// The compiler may split even a uint4 that it stores; __stwb is the default store, which it must leave whole.
template <int kCount, class T>
__device__ __forceinline__ void store(T* to, const Vec<T, kCount>& vec) {
  if constexpr (kCount == 1) {
    *to = vec.item[0];
  } else {
    using Raw = typename Access<sizeof vec>::Type;
    Raw raw[sizeof vec / sizeof(Raw)];
    memcpy(raw, &vec, sizeof vec);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof vec / sizeof(Raw)); ++i) {
      __stwb(reinterpret_cast<Raw*>(to) + i, raw[i]);
    }
  }
}

}  // namespace fastsync::kernels
