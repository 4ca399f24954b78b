// Facts about processes of this machine from the system, and the Python stack of a thread of this
// process.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <string>

namespace fastsync::engine {

struct ProcessEnd {
  bool lives = false;
  std::string how;  // "was killed by SIGKILL"; empty if unknown
};

// Returns how a process of this machine has ended. An exiting process does not live.
ProcessEnd end_of_process(int64_t process);
bool is_stopped(int64_t process);

// Lets this process print `line` when SIGTERM ends it, and then end as it would have. Does nothing
// if the program handles the signal.
void announce_termination(const std::string& line);

// Makes a handler of `signal` write the stack of `thread` to `file`, and returns the text; empty if
// there is no handler or no text in time.
std::string stack_of(pthread_t thread, int signal, int file);

}  // namespace fastsync::engine
