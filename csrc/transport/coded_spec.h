// Coded buckets as Python's plan describes them.
#pragma once

#include <cstdint>
#include <memory>

#include "../codec/coder.h"
#include "../kernels/random.h"

namespace fastsync::engine {

struct CodedSpec {
  kernels::Format format = kernels::Format::kFloat32;
  std::shared_ptr<Codec> codec;  // a user's, instead of the format
  int64_t kept = 0;         // elements that top-k keeps, instead of the format; 0: it is not top-k
  bool gather = false;      // the gather form
  int64_t chunk_numel = 0;  // elements: a piece in the gather form, otherwise a rank's part of it
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

  // Layouts of codes and of flags in so many chunks.
  ops::CodePlan values_plan(int64_t chunks) const {
    return {{format, chunk_numel, chunk_bytes, 0}, chunks * chunk_numel, stochastic};
  }
  ops::CodePlan flags_plan(int64_t chunks) const {
    return {{kernels::Format::kFloat32, flags_per_chunk, chunk_bytes, flags_offset},
            chunks * flags_per_chunk};
  }
  uint64_t seed_of(uint64_t step) const { return kernels::mixed(seed + (step << 32)); }
};

}  // namespace fastsync::engine
