// Sums of sparse gradients by an all-gather of their rows.
//
// [Note: sparse sums over Gloo]
// Gloo's threads note the name of the work that they have completed in one string of their process
// group, and take no lock. "_ALLREDUCE_SPARSE" is the only name that does not fit into the string
// itself: a thread that completes another work at the same moment then writes to memory that the
// first has freed. So the rows are gathered and summed here: first their numbers, and, when the sum
// is asked for, the rows, padded to the largest number.
//
// The numbers also say which ranks have a dense tensor instead, as where one rank alone ties an
// embedding to a linear layer. Then all ranks send a dense one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "in_flight.h"

namespace fastsync::comm {

// Sends a rank's tensor as a dense one.
using SendDense = std::function<std::unique_ptr<InFlight>()>;
using GatherRows =
    std::function<std::unique_ptr<InFlight>(const at::Tensor& gathered, const at::Tensor& mine)>;

// `rows`: coalesced; undefined if this rank has a dense tensor. The sum is what wait() returns.
// `dense` is called by it, on all ranks, if the tensor of any rank is dense. `gather`: an
// all-gather over so many ranks.
std::unique_ptr<InFlight> sum_sparse_rows(const at::Tensor& rows, SendDense dense, int64_t ranks,
                                          GatherRows gather);

}  // namespace fastsync::comm
