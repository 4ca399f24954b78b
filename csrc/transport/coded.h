// Gradients coded to bytes, summed in fp32, and coded again: the two-shot form; or summed by everyone: the gather form.
//
//   two-shot   encode ─▶ all-to-all of chunks ─▶ decode, sum, encode ─▶ all-gather of sums ─▶ decode
//   gather     encode ─▶ all-gather of everything ─▶ decode and sum
//
// The two-shot form moves the bytes of a ring all-reduce, 2 (N-1)/N of the coded bucket from and to each of N ranks, and
// rounds twice: each gradient, and each average. ZeRO++ (Wang et al., 2023) and Bagua's ByteGrad do the same. The gather form moves
// (N-1) coded buckets and rounds once: better at two ranks, where the bytes are equal, and for sparse codes, whose sums are
// longer than their terms. All ranks decode the same bytes in the same order, so they hold the same bits.
//
// The bucket travels in `pieces`: while one is summed, the next is on the wire.
//
// [Note: one residual]
// Error feedback (Seide et al., 2014; Karimireddy et al., 2019) adds what a code lost to the next step's gradient. What the second
// rounding loses belongs to the average, and so to any rank's share of it: the rank that sums a chunk adds it to its own
// residual. The sum of the residuals over ranks is then exactly what the averages applied so far still lack.
//
// [Note: flags on a coded wire]
// Used flags and the vote travel behind the codes of each chunk as floats, and are summed exactly.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "../codec/coder.h"
#include "transport.h"

namespace fastsync::engine {

struct CodedSpec {
  kernels::Format format = kernels::Format::kFloat32;
  std::shared_ptr<Codec> codec;  // a user's, instead of the format
  int64_t kept = 0;         // elements that top-k keeps, instead of the format; 0: it is not top-k
  bool gather = false;      // the gather form
  int64_t chunk_numel = 0;  // elements: a piece in the gather form, else a rank's part of it
  int64_t chunk_bytes = 0;  // codes, flags and padding
  int64_t coded_bytes = 0;  // codes alone
  int64_t pieces = 1;
  int64_t flags_offset = 0;     // byte of the first flag in a chunk
  int64_t flags_per_chunk = 0;  // floats; 0: no flags travel
  int64_t node_ranks = 1;       // ranks of a node; more than 1: the hierarchical form
  int64_t node_rank = 0;        // this one's place among them
  int64_t nodes = 1;            // and then, between how many
  int64_t node = 0;
  bool error_feedback = false;
  bool stochastic = false;
  uint64_t seed = 0;  // of stochastic rounding; 32 bits, others on every rank and bucket

  // Where codes, and flags, lie in so many chunks.
  ops::WirePlan values_plan(int64_t chunks) const;
  ops::WirePlan flags_plan(int64_t chunks) const;
  uint64_t seed_of(Taking how) const;
};

// Between `ranks` ranks, of which this is number `rank`.
std::unique_ptr<Wire> make_coded_wire(const CodedSpec& spec, int rank, int ranks,
                                      at::Device device);

}  // namespace fastsync::engine
