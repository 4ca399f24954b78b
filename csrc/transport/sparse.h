// Transport of one parameter whose gradient may be a sparse tensor: it travels alone, coalesced,
// its used flag and the vote after it in a collective of their own. If the gradient of any rank is
// dense, all ranks send a dense one, and get one.
#pragma once

#include <functional>
#include <memory>

#include "flat.h"

namespace fastsync::engine {

// Sends a sparse tensor, or nothing yet if this rank's is dense, by an all-reduce or to a
// communication hook; see Collective::all_reduce_rows. Hooks need tensors of one layout on all
// ranks.
using SendRows =
    std::function<std::unique_ptr<comm::InFlight>(const at::Tensor& rows, comm::SendDense dense)>;

// `dense`: how dense gradients travel. `flags_group`: sums the flags; null where none travel.
std::unique_ptr<Transport> make_sparse(Slots& slots, std::unique_ptr<Flat> dense, SendRows send,
                                       std::shared_ptr<comm::Collective> flags_group);

}  // namespace fastsync::engine
