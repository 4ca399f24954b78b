// What the system tells about processes of this machine, and the Python stack of one of this
// process's threads.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <string>

namespace fastsync::engine {

struct ProcessEnd {
  bool lives = false;
  std::string how;  // "was killed by SIGKILL"; empty where nobody knows
};

// Of a process of this machine. One that has begun to end does not live.
ProcessEnd end_of_process(int64_t process);
bool is_stopped(int64_t process);

// Has this process print `line` when SIGTERM ends it, and end as it would have; nothing where the
// program handles the signal.
void announce_termination(const std::string& line);

// Has a handler of `signal` write `thread`'s stack to `file`, and returns that; empty where there
// is none, or it does not come.
std::string stack_of(pthread_t thread, int signal, int file);

}  // namespace fastsync::engine
