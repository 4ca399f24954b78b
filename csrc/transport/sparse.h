// Transport of one parameter whose gradient may be a sparse tensor: it travels alone, coalesced,
// its used flag and the vote after it in a collective of their own. A dense gradient of such a
// parameter travels as any other.
#pragma once

#include <functional>
#include <memory>

#include "flat.h"

namespace fastsync::engine {

// Sends a sparse tensor; by an all-reduce, or to a communication hook.
using SendRows = std::function<std::unique_ptr<comm::InFlight>(const at::Tensor& rows)>;

// `dense`: how dense gradients travel. `flags_group`: sums the flags; null where none travel.
std::unique_ptr<Transport> make_sparse(Slots& slots, std::unique_ptr<Flat> dense, SendRows send,
                                       std::shared_ptr<comm::Collective> flags_group);

}  // namespace fastsync::engine
