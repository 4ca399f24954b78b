#include "accesses.h"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace simulated {
namespace {

// Threads of a kernel run one after the other and go through as many places in turn.
constexpr size_t kPlaces = 16;

uintptr_t from = 0, to = 0;
std::vector<Range> noted;

void note(const void* address, size_t bytes, bool written) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (at < from || at >= to) return;
  const size_t last = noted.size();
  for (size_t i = last; i > 0 && i + kPlaces > last; --i) {
    Range& range = noted[i - 1];
    const auto begin = reinterpret_cast<uintptr_t>(range.begin);
    if (range.written != written || at < begin || at > begin + range.bytes) continue;
    range.bytes = std::max(range.bytes, at + bytes - begin);
    return;
  }
  noted.push_back({address, bytes, written});
}

}  // namespace

void begin_accesses(const void* memory, size_t bytes) {
  from = reinterpret_cast<uintptr_t>(memory);
  to = from + bytes;
}

std::vector<Range> end_accesses() {
  from = to = 0;
  return std::exchange(noted, {});
}

}  // namespace simulated

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void*) {}
void __tsan_vptr_update(void**, void*) {}
uint8_t __tsan_atomic8_load(const volatile uint8_t* at, int) {
  return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

#define FS_NOTED(bytes)                                                              \
  void __tsan_read##bytes(void* at) { simulated::note(at, bytes, false); }           \
  void __tsan_write##bytes(void* at) { simulated::note(at, bytes, true); }           \
  void __tsan_unaligned_read##bytes(void* at) { simulated::note(at, bytes, false); } \
  void __tsan_unaligned_write##bytes(void* at) { simulated::note(at, bytes, true); }

FS_NOTED(1)
FS_NOTED(2)
FS_NOTED(4)
FS_NOTED(8)
FS_NOTED(16)

void __tsan_read_range(void* at, size_t bytes) { simulated::note(at, bytes, false); }
void __tsan_write_range(void* at, size_t bytes) { simulated::note(at, bytes, true); }
}
