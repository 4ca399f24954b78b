// Sparsification: of a bucket's elements those of largest magnitude travel, with their positions.
//
//   | positions, int32 [k] | values, fp32 [k] |
//
// The whole bucket is one chunk, and every rank sums what all ranks sent: the sum of N sparse
// vectors has up to N k elements, so coding it again would lose most of it. Stich et al.,
// "Sparsified SGD with memory", 2018; Lin et al., "Deep gradient compression", 2018.
#pragma once

#include <cstdint>
#include <memory>

#include "coder.h"

namespace fastsync::engine {

// Keeps `kept` elements. plan.numel is one chunk.
std::shared_ptr<Coder> make_topk_coder(const ops::CodePlan& plan, int64_t kept);

}  // namespace fastsync::engine
