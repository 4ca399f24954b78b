// Chooses a bucket's transport: the one place that depends on the bucket's kind.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "../comm/hook.h"
#include "coded_spec.h"
#include "comm/pipeline.h"
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

// Routes that a bucket may travel over.
struct Routes {
  std::shared_ptr<comm::Collective> group;
  std::shared_ptr<comm::Pipelines> pipelines;  // for codes
  std::shared_ptr<comm::Hook> hook;            // of the user, reduces the buckets
  // The group's ranks, for regions; on a CPU only regions use it.
  std::shared_ptr<comm::Collective> shards;
  std::shared_ptr<comm::Collective> memory;  // which the ranks share; null: they do not
  std::shared_ptr<ops::BufferPool> pool = std::make_shared<ops::BufferPool>();

  // Whether this rank sends at all.
  bool communicate() const { return hook != nullptr || group->size() > 1; }
};

// Makes the transport of bucket `index` of `count`. `slots` must live longer.
std::unique_ptr<Transport> choose_transport(const BucketSpec& spec, Slots& slots,
                                            const Routes& routes, size_t index, size_t count);

}  // namespace fastsync::engine
