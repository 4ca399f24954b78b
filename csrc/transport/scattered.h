// Transport of buckets whose averages only their owners keep (ZeRO, stages 1 and 2).
//
// [Note: regions]
// A unit is a set of parameters, laid out as fastsync/zero/partition.py says: one region per rank.
// Rank r receives all ranks' parts of region r and keeps the averages in its shard. A bucket
// carries members of one unit that are trained; how their parts reach their owners is in regions.h.
// The flags that travel with them are those of flat.h, and one more per slot that says whether the
// average is added to the gradient that was there before. Each rank sums them for itself.
//
// [Note: gradient proxies]
// After a backward a rank has no unsharded gradient that a script could read, so `param.grad`
// becomes a proxy: a tensor without memory, whose operations fastsync/zero/gradient_proxies.py
// implements. At the start of a backward proxies are taken off, so that autograd accumulates into
// tensors of its own; the averages behind the proxies count as accumulated before. A proxy that is
// still referenced keeps its values, as a gradient would: release() copies them before they are
// overwritten.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "regions.h"
#include "shared_gradients.h"
#include "transport.h"

namespace fastsync::engine {

struct ScatterSpec {
  std::shared_ptr<ShardedGradients> gradients;
  std::vector<size_t> members;  // of the unit, by slot
  int64_t first = 0;            // element of the unit that this rank's region begins with
  RegionLayout layout;
  std::vector<RegionPart> parts;  // of the slots
};

// Slots' offsets are those in the unit. The slots must live longer.
std::unique_ptr<Transport> make_scattered(const ScatterSpec& spec, Slots& slots,
                                          std::unique_ptr<Regions> regions);

}  // namespace fastsync::engine
