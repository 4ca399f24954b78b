// Transport of buckets that a communication hook reduces.
//
// The buffer belongs to the hook while it runs, so it holds gradients and nothing else, as they
// were computed. The hook is handed one view of it, which is kept: backends that hold what they
// were given for a while then hold nothing new.
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
