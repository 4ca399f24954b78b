// Transports of buckets that are no plain sums, for choose.cpp. Slots must live longer than these.
#pragma once

#include <functional>
#include <memory>

#include "coding.h"
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

std::unique_ptr<Flat> make_hooked(const FlatSpec& spec, Slots& slots, comm::Hook hook,
                                  HookPlace place, int ranks);

// Sends a sparse tensor, or nothing yet if this rank's is dense, by an all-reduce or to a
// communication hook; see Collective::all_reduce_rows. Hooks need tensors of one layout on all
// ranks.
using SendRows =
    std::function<std::unique_ptr<comm::InFlight>(const at::Tensor& rows, comm::SendDense dense)>;

// `dense`: how dense gradients travel. `flags_group`: sums the flags; null where none travel.
std::unique_ptr<Transport> make_sparse(Slots& slots, std::unique_ptr<Flat> dense, SendRows send,
                                       std::shared_ptr<comm::Collective> flags_group);

// Buckets that travel as codes.
std::unique_ptr<Transport> make_pipelined(std::unique_ptr<Coding> coding, Slots& slots,
                                          std::shared_ptr<comm::Pipelines> pipelines);

}  // namespace fastsync::engine
