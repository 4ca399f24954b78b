// Transport of buckets that travel as codes, through a pipeline of collectives.
//
// [Note: repeatable steps]
// After a death the survivors may average a step again (reducer_elastic.cpp), each from its
// gradients and its error-feedback residual of before the step. Both stay until the averages are
// delivered, after the vote that ends the step:
//
//   * Gradients are read where autograd has put them. Averages are written there in deliver()
//     alone, not as they arrive.
//   * Coding changes the residual: coding of gradients and, in the two-shot form, of sums. It is
//     copied before the first coding. deliver() keeps the new residual; abandon() goes back to the
//     copy. Abandoned pipelines may still sum, and keep the buffers that they write to.
#pragma once

#include <memory>

#include "coding.h"
#include "comm/pipeline.h"
#include "transport.h"

namespace fastsync::engine {

// The slots must live longer than the transport.
std::unique_ptr<Transport> make_pipelined(std::unique_ptr<Coding> coding, Slots& slots,
                                          std::shared_ptr<comm::Pipelines> pipelines);

}  // namespace fastsync::engine
