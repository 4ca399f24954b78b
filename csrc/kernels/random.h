// Random numbers that are the same on every machine, host and device.
#pragma once

#include <cstdint>

#include "element.h"

namespace fastsync::kernels {

// Scatters the bits of a seed or counter: the finaliser of SplitMix64 (Steele, Lea, Flood: Fast
// splittable pseudorandom number generators, 2014). Sums of seeds and counters do for its argument.
FS_HOST_DEVICE uint64_t mixed(uint64_t value) {
  value += 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

}  // namespace fastsync::kernels
