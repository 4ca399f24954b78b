// A rank in a process of its own, which has a segment and does nothing with it.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>

#include "harness.h"
#include "shm/segment.h"

namespace fastsync::testing {

class OtherProcess {
 public:
  explicit OtherProcess(size_t bytes) {
    int ends[2];
    EXPECT(pipe(ends) == 0, "pipe");
    child_ = fork();
    if (child_ == 0) {
      const auto kept = comm::Segment::make(bytes);
      const bool sent = write(ends[1], &kept->address(), sizeof(comm::SegmentAddress)) > 0;
      pause();
      _exit(sent ? 0 : 1);
    }
    EXPECT(read(ends[0], &address_, sizeof address_) == sizeof address_, "read");
  }
  ~OtherProcess() {
    kill();
    waitpid(child_, nullptr, 0);
  }
  OtherProcess(const OtherProcess&) = delete;
  OtherProcess& operator=(const OtherProcess&) = delete;

  const comm::SegmentAddress& address() const { return address_; }
  // It ends, and stays a zombie as long as this object lives.
  void kill() const { ::kill(child_, SIGKILL); }

 private:
  pid_t child_ = -1;
  comm::SegmentAddress address_;
};

}  // namespace fastsync::testing
