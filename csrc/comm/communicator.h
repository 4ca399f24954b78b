// The carrier of collectives on a device, as the fault watch sees it: any thread may call this, at
// any time.
#pragma once

#include <functional>

namespace fastsync::comm {

struct Communicator {
  // Aborts kernels in flight, and so the waits for them. May block. Null if there is nothing to
  // abort.
  std::function<void()> abort;
  std::function<double()> timeout;  // seconds after which its backend gives up; 0: unknown
};

}  // namespace fastsync::comm
