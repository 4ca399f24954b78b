// Names of our threads in programs that list threads: `top -H`, debuggers, profilers.
#pragma once

#include <pthread.h>

namespace fastsync::comm {

// At most 15 characters.
inline void name_this_thread([[maybe_unused]] const char* name) {
#ifdef __linux__
  pthread_setname_np(pthread_self(), name);
#endif
}

}  // namespace fastsync::comm
