// Data of other ranks for this one, in memory that it reads for a while: theirs, or a buffer that
// messages arrive in.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "../ops/pool.h"
#include "in_flight.h"

namespace fastsync::comm {

// Neither end waits for another rank: that of release(), nor that of one which never was given
// back.
class Incoming : public InFlight {
 public:
  // After wait(): equal parts, from each other rank, in their order; or those that were expected.
  virtual const std::vector<at::Tensor>& parts() const = 0;
  // They are not read any more.
  virtual void release() = 0;
};

// So many elements, from a rank.
struct Expected {
  int rank = 0;
  int64_t numel = 0;
};

struct MessageBuffers {
  at::Tensor received;
  at::Tensor sent;
};
// Data that arrives in so many parts. Both buffers are of `pool`, and go back there.
std::shared_ptr<Incoming> incoming_in(std::unique_ptr<InFlight> arriving, MessageBuffers buffers,
                                      int64_t parts, std::shared_ptr<ops::BufferPool> pool);

}  // namespace fastsync::comm
