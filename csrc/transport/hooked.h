// Transport of buckets that a communication hook reduces.
//
// The buffer belongs to the hook while the hook runs, so it holds only gradients, as they were
// computed. The hook gets one view of it, and the same view each step: backends that keep their
// input for a while then keep no new memory.
#pragma once

#include <memory>

#include "../comm/hook.h"
#include "flat.h"

namespace fastsync::engine {

// The bucket's place among all buckets of the plan.
struct HookPlace {
  size_t index = 0;
  size_t count = 1;
};

// The bucket as the hook sees it: `buffer` holds its gradients, in elements of the parameters'
// dtype.
comm::HookBucket hook_bucket(const Slots& slots, const at::Tensor& buffer, HookPlace place);

std::unique_ptr<Flat> make_hooked(const FlatSpec& spec, Slots& slots,
                                  std::shared_ptr<comm::Hook> hook, HookPlace place, int ranks);

}  // namespace fastsync::engine
