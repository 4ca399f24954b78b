// Memory accesses of CUDA kernels: several elements at once, in as few and as wide instructions as
// there are.
#pragma once

#include <cstdint>
#include <cstring>

namespace fastsync::kernels {

constexpr int kAccessBytes = 16;

template <class T, int kCount>
struct Vec {
  T item[kCount];
};

// [Note: whole sectors]
// Memory moves in sectors of 32 bytes. Where neighbouring threads' accesses lie side by side, each
// instruction of a warp fills the sectors that it touches. A thread that owned 32 bytes in a row
// would need two instructions of 16, each of which fills half of every sector. So a thread never
// moves more than one access at a time of consecutive memory: the widest type decides how many
// elements that is, and what a thread does besides lies a whole warp, or block, further on.

// Whether kCount elements from `pointer` on may be one access.
template <int kCount, class T>
__device__ __forceinline__ bool aligned(const T* pointer) {
  constexpr uintptr_t kBytes = kCount * sizeof(T);
  return reinterpret_cast<uintptr_t>(pointer) % kBytes == 0;
}

// The type of one access to a Vec. A struct of small members may be moved by several narrow
// accesses.
template <int kBytes>
struct Access;
template <>
struct Access<16> {
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
template <>
struct Access<2> {
  using Type = unsigned short;
};

template <int kCount, class T>
__device__ __forceinline__ Vec<T, kCount> load(const T* from) {
  Vec<T, kCount> vec;
  if constexpr (kCount == 1) {
    vec.item[0] = *from;
  } else {
    using Raw = typename Access<sizeof vec>::Type;
    const Raw raw = *reinterpret_cast<const Raw*>(from);
    memcpy(&vec, &raw, sizeof vec);
  }
  return vec;
}

// The compiler may split even a uint4 that it stores; __stwb is the default store, which it must
// leave whole.
template <int kCount, class T>
__device__ __forceinline__ void store(T* to, const Vec<T, kCount>& vec) {
  if constexpr (kCount == 1) {
    *to = vec.item[0];
  } else {
    using Raw = typename Access<sizeof vec>::Type;
    Raw raw;
    memcpy(&raw, &vec, sizeof vec);
    __stwb(reinterpret_cast<Raw*>(to), raw);
  }
}

}  // namespace fastsync::kernels
