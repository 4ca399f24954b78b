// Gradients coded to bytes, summed in fp32, and coded again: the two-shot form; or summed by every
// rank: the gather form.
//
//   two-shot  encode ─▶ all-to-all of chunks ─▶ decode, sum, encode ─▶ all-gather of sums ─▶ decode
//   gather    encode ─▶ all-gather of everything ─▶ decode and sum
//
// The two-shot form moves the bytes of a ring all-reduce, 2 (N-1)/N of the coded bucket from and to
// each of N ranks, and rounds twice: each gradient, and each average. ZeRO++ (Wang et al., 2023)
// and Bagua's ByteGrad do the same. The gather form moves (N-1) coded buckets and rounds once:
// better at two ranks, where the bytes are equal, and for sparse codes, whose sums are longer than
// their terms. All ranks decode the same bytes in the same order, so they hold the same bits.
//
// The bucket travels in `pieces`: while one is summed, the next is on the wire.
//
// [Note: one residual]
// Error feedback (Seide et al., 2014; Karimireddy et al., 2019) adds what a code lost to the next
// step's gradient. What the second rounding loses belongs to the average, and so to any rank's
// share of it: the rank that sums a chunk adds it to its own residual. The sum of the residuals
// over ranks is then exactly what the averages applied so far still lack.
//
// [Note: flags of a coded bucket]
// Used flags and the vote travel after the codes of each chunk as floats, and are summed exactly.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "coded_spec.h"
#include "coding.h"

namespace fastsync::engine {

// Between `ranks` ranks, of which this is number `rank`.
std::unique_ptr<Coding> make_coded(const CodedSpec& spec, int rank, int ranks, at::Device device);

}  // namespace fastsync::engine
