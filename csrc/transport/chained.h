// Transport of buckets that travel as codes, through a chain of collectives.
//
// [Note: repeatable steps]
// After a death the survivors may average a step again (reducer_elastic.cpp), each from what it had
// before: its gradients, and what error feedback had kept back. Both stay until the averages are
// delivered, which is after the vote that ends the step:
//
//   * Gradients are read where autograd has put them. Averages are written there in deliver()
//     alone, and not as they come.
//   * Codes change the residual: those of gradients, and in the two-shot form those of sums. It is
//     copied before the first of them. deliver() makes the new one count; abandon() goes back to
//     the copy. Chains that are left behind may still sum, and keep the buffers that they write to.
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
