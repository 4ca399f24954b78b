// Chooses a bucket's transport: the one place that depends on the bucket's kind.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "flat.h"
#include "scattered.h"

namespace fastsync::engine {

struct SlotSpec {
  int64_t param = 0;   // index into the reducer's parameters
  int64_t offset = 0;  // first real element in the flat buffer
};

// A bucket as Python's plan describes it.
struct BucketSpec {
  std::vector<SlotSpec> slots;
  FlatSpec flat;
  bool sparse = false;  // one parameter whose gradient may be a sparse tensor
  // Travels as codes instead; no views, no flags in the flat buffer.
  std::optional<CodedSpec> coded;
  // Each rank keeps the averages of its own region.
  std::optional<ScatterSpec> scatter;
  size_t group = 0;  // of ranks that average it; see [Note: groups]
};

// Makes the transport of bucket `index` of `count`. `slots` must live longer.
std::unique_ptr<Transport> choose_transport(const BucketSpec& spec, Slots& slots,
                                            const Routes& routes, size_t index, size_t count);

}  // namespace fastsync::engine
