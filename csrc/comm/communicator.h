// What carries collectives on a device, for whoever looks out for faults: any thread may call this,
// as long as it likes.
#pragma once

#include <functional>

namespace fastsync::comm {

struct Communicator {
  // Ends what is under way: kernels, and whoever waits for them. May block. Null where there is
  // nothing to end.
  std::function<void()> abort;
  std::function<double()> timeout;  // seconds after which its backend gives up; 0: nobody knows
};

}  // namespace fastsync::comm
