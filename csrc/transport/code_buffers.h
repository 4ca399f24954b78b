// Buffers of codes that travel between ranks in the two-shot or the gather form, and the operations
// on them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "../codec/coder.h"
#include "coded_spec.h"

namespace fastsync::engine {

// Makes the coder that the spec requires, for payloads of `plan`.
std::shared_ptr<Coder> make_coder(const CodedSpec& spec, const ops::CodePlan& plan);

// Parts of the buffers that travel together.
struct CodePiece {
  at::Tensor sent;
  at::Tensor received;
  at::Tensor sum;
};

// Shared with collectives in flight, which may end after the bucket.
struct CodeBuffers {
  // Buffers of rank `my_rank` among `all_ranks` that exchange codes.
  CodeBuffers(const CodedSpec& coded, int my_rank, int all_ranks, at::Device on);

  // Returns new ones of the same kind, when collectives still write to these.
  std::shared_ptr<CodeBuffers> renewed() const;
  // Allocates, with zeros where nothing is ever written: between the slots.
  void allocate();

  int32_t sources() const { return spec.gather ? ranks : 1; }
  int64_t chunks() const { return spec.pieces * (spec.gather ? 1 : ranks); }
  int64_t piece_numel() const { return plan.numel / spec.pieces; }
  // Returns how codes are laid out in `sent`.
  ops::Encoding encoding() const;
  void encode(const std::vector<ops::Item>& items, const ops::Encoding& how) const {
    coder->encode(items, residual, sent, how);
  }
  // Sums my chunk of a piece that has arrived from all ranks.
  void sum(int64_t piece) const;

  CodedSpec spec;
  int rank;
  int ranks;
  at::Device device;
  ops::CodePlan plan;
  ops::CodePlan flags_plan;
  std::shared_ptr<Coder> coder;
  std::shared_ptr<Coder> flags_coder;  // null if no flags travel
  at::Tensor sent;      // in the gather form `received`, where each rank has a part of every piece
  at::Tensor received;  // in the two-shot form first the others' parts of my chunk, then all sums
  at::Tensor sums;
  std::vector<CodePiece> pieces;  // of these buffers
  at::Tensor residual;
  std::vector<float> sent_flags;  // what the buffer to send holds already
  uint64_t seed = 0;              // of this step

 private:
  CodePiece piece(int64_t index) const;
};

}  // namespace fastsync::engine
