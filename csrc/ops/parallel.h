// Division of work among torch's intra-op threads.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>

namespace fastsync::ops {

// Elements below which another CPU thread costs more than it saves (128 KiB of fp32).
constexpr int64_t kGrain = 32768;

// Whether work on so many elements stays on this thread.
inline bool stays_here(int64_t elements) {
  return elements < 2 * kGrain || at::get_num_threads() == 1 || at::in_parallel_region();
}

// Calls run(begin, end) for ranges that together are [0, count); each of the `count` units is work
// on `each` elements.
template <typename Run>
void parallel_ranges(int64_t count, int64_t each, const Run& run) {
  const int64_t elements = std::max<int64_t>(1, each);
  if (stays_here(count * elements)) {
    run(int64_t{0}, count);
    return;
  }
  at::parallel_for(0, count, std::max<int64_t>(1, kGrain / elements), run);
}

}  // namespace fastsync::ops
