// Tables of work in the parameters of a CUDA kernel.
//
// [Note: segment table]
// The table travels by value in the kernel's parameters (constant memory), so a launch needs no
// host-to-device copy and the caller's array may be freed at once. A launch takes the host the
// longer, the larger its table is, used or not, so there are several capacities: up to 4 KB of
// parameters, the limit before CUDA 12.1, and up to 32,764 bytes, the limit since then from sm_70
// on, so that a thousand small tensors need one launch. The kernel must not modify the table: a
// by-value parameter that is written to moves to local memory.
#pragma once

#include <cstdint>

namespace fastsync::kernels {

constexpr int kSmallParameters = 4096;
#if defined(CUDART_VERSION) && CUDART_VERSION < 12010
constexpr int kMediumParameters = kSmallParameters;
constexpr int kLargeParameters = kSmallParameters;
#else
constexpr int kMediumParameters = 8192;
constexpr int kLargeParameters = 32764;
#endif

// The last entry whose first block is not after `block`.
template <class AnyTable>
__device__ __forceinline__ int find_segment(const AnyTable& table, uint32_t block) {
  int low = 0;
  int high = table.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.first_block[middle] <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace fastsync::kernels
