// Communication hooks: a user's function takes a bucket and returns a future of its reduced
// gradients.
//
// Hooks written for torch's DistributedDataParallel run unmodified: they are handed a real
// c10d::GradBucket, whose buffer has not been divided by the number of ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "in_flight.h"

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

// Calls the hook. What wait() returns holds the reduced gradients in the bucket's layout.
using Hook = std::function<std::unique_ptr<InFlight>(const HookBucket& bucket)>;

}  // namespace fastsync::comm
