// What kernels read and write, to the byte. Their units are compiled with -fsanitize=thread, which
// makes a call before each access; these calls end here, not in that sanitizer's library.
#pragma once

#include <vector>

#include "stream.h"

namespace simulated {

// Notes accesses to the memory given from now on. One kernel runs at a time.
void begin_accesses(const void* memory, size_t bytes);
// Returns them, and notes no more.
std::vector<Range> end_accesses();

}  // namespace simulated
