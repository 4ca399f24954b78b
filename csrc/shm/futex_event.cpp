#include "shm/futex_event.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>

namespace fastsync::comm {

// Between processes: not FUTEX_PRIVATE.
void FutexEvent::notify() {
  words_.changes.fetch_add(1);
  if (words_.sleepers.load() == 0) return;
  auto* const word = reinterpret_cast<uint32_t*>(&words_.changes);
  syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void FutexEvent::pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

bool FutexEvent::sleep(uint32_t seen, std::chrono::milliseconds time) {
  const auto count = time.count();
  timespec limit{static_cast<time_t>(count / 1000), static_cast<long>(count % 1000) * 1000000};
  auto* const word = reinterpret_cast<uint32_t*>(&words_.changes);
  const long result = syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, nullptr, 0);
  return result == 0 || errno != ETIMEDOUT;
}

}  // namespace fastsync::comm
