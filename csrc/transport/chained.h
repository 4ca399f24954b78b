// Transport of buckets that travel as codes, through a chain of collectives.
#pragma once

#include <memory>

#include "../comm/chain.h"
#include "coding.h"
#include "transport.h"

namespace fastsync::engine {

// The slots must outlive it.
std::unique_ptr<Transport> make_chained(std::unique_ptr<Coding> coding, Slots& slots,
                                        std::shared_ptr<comm::Chains> chains);

}  // namespace fastsync::engine
