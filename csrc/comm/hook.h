// Communication hooks: a user's function takes a bucket and returns a future of its reduced
// gradients.
//
// Hooks written for torch's DistributedDataParallel run unmodified: they are handed a real
// c10d::GradBucket, whose buffer has not been divided by the number of ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "collective.h"

namespace fastsync::comm {

// One gradient in a bucket's buffer. `sizes` must live longer than the collective.
struct HookSlot {
  size_t offset = 0;  // elements of the buffer
  size_t numel = 0;
  at::IntArrayRef sizes;
  at::Tensor parameter;
};

// A bucket as a hook sees it.
struct HookBucket {
  size_t index = 0;
  size_t count = 1;  // buckets in the plan
  at::Tensor buffer;
  std::vector<HookSlot> slots;
};

class Hook {
 public:
  virtual ~Hook() = default;

  // Calls the hook. The tensor that wait() returns holds the reduced gradients in the bucket's
  // layout.
  virtual std::unique_ptr<InFlight> run(const HookBucket& bucket) = 0;
};

}  // namespace fastsync::comm
