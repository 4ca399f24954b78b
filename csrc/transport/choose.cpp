#include "choose.h"

#include <utility>

#include "../check.h"
#include "transports.h"

namespace fastsync::engine {
namespace {

// The transport of a training on one rank, which sends nothing.
class Alone final : public Transport {
 public:
  void take(size_t /*slot*/, const Packing& /*how*/) override {}
  bool takes_once() const override { return false; }
  void pack(const Packing& /*how*/) override {}
  std::unique_ptr<comm::InFlight> launch() override { return comm::all_of({}); }
  void deliver(const std::vector<bool>& /*used*/) override {}
  void abandon(bool /*in_flight*/) override {}
  Shadow shadow(uint64_t /*step*/) override {
    return Shadow{comm::all_of({}), [] { return at::Tensor(); }};
  }
  bool has_flags() const override { return false; }
  at::Tensor flags() const override { return {}; }
  at::Tensor vote() const override { return {}; }
  int64_t bytes() const override { return 0; }
  int64_t sent_bytes() const override { return 0; }
};

std::unique_ptr<Coding> make_coding(const BucketSpec& spec, const comm::Collective& group,
                                    at::Device device) {
  if (spec.coded->node_ranks > 1) return make_hierarchical(*spec.coded, device);
  return make_coded(*spec.coded, group.rank(), group.size(), device);
}

// Returns the carrier of sums: shared memory if the ranks have it. The bucket of a sparse gradient
// sends its flags over the group, after its rows.
std::shared_ptr<comm::Collective> sum_over(const BucketSpec& spec, const Routes& routes,
                                           at::Device device) {
  if (routes.memory && device.is_cpu() && !spec.sparse) return routes.memory;
  return routes.group;
}

SendRows send_rows(const Slots& slots, const Routes& routes, HookPlace place) {
  if (!routes.hook) {
    const at::Device device = slots.front().param->tensor.device();
    return [group = routes.group, device](const at::Tensor& rows, comm::SendDense dense) {
      return group->all_reduce_rows(rows, std::move(dense), device);
    };
  }
  return [hook = routes.hook, &slots, place](const at::Tensor& rows, const comm::SendDense& dense) {
    return rows.defined() ? hook(hook_bucket(slots, rows, place)) : dense();
  };
}

}  // namespace

std::unique_ptr<Transport> choose_transport(const BucketSpec& spec, Slots& slots,
                                            const Routes& routes, size_t index, size_t count) {
  // A group of one rank among others has a divisor, so that its buckets are packed.
  if (!routes.communicate() && spec.group == 0) return std::make_unique<Alone>();
  if (spec.scatter) {
    const CodedSpec* const coded = spec.coded ? &*spec.coded : nullptr;
    const ScatterSpec& scatter = *spec.scatter;
    return make_scattered(scatter, slots,
                          make_regions(scatter.layout, scatter.gradients->shard, coded, routes));
  }
  const at::Device device = slots.front().param->tensor.device();
  if (spec.coded) {
    FS_CHECK(routes.pipelines, "coded buckets need process groups for their pipelines");
    return make_pipelined(make_coding(spec, *routes.group, device), slots, routes.pipelines);
  }
  const HookPlace place{index, count};
  auto flat = routes.hook ? make_hooked(spec.flat, slots, routes.hook, place, routes.group->size())
                          : make_all_reduce(spec.flat, slots, sum_over(spec, routes, device));
  if (!spec.sparse) return flat;
  const bool flags = !routes.hook && spec.flat.flags_offset >= 0;
  return make_sparse(slots, std::move(flat), send_rows(slots, routes, place),
                     flags ? routes.group : nullptr);
}

}  // namespace fastsync::engine
