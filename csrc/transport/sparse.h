// Transport of one parameter whose gradient may be a sparse tensor: it travels alone, coalesced, and without flags, since the
// rows that it holds tell whether anybody used it. A dense gradient of such a parameter travels as any other.
#pragma once

#include <functional>
#include <memory>

#include "flat.h"

namespace fastsync::engine {

// Sends a sparse tensor; by an all-reduce, or to a communication hook.
using SendRows = std::function<std::unique_ptr<comm::InFlight>(const at::Tensor& rows)>;

// `dense`: how dense gradients travel.
std::unique_ptr<Transport> make_sparse(Slots& slots, std::unique_ptr<Flat> dense, SendRows send);

}  // namespace fastsync::engine
