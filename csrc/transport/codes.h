// Codes of buckets: how Python's plan describes them, and the buffers that they travel in.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "../codec/coder.h"
#include "../kernels/random.h"

namespace fastsync::engine {

// Coded buckets as Python's plan describes them.
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

// Makes the coder that the spec requires, for payloads of `plan`.
std::shared_ptr<Coder> make_coder(const CodedSpec& spec, const ops::CodePlan& plan);

// Parts of the buffers that travel together.
struct CodePiece {
  at::Tensor sent;
  at::Tensor received;
  at::Tensor sum;
};

// Buffers of codes that travel between ranks in the two-shot or the gather form, and the operations
// on them. Shared with collectives in flight, which may end after the bucket.
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

// Codes of chunks that go to their owners: written for all of them, and added up for one.
class RegionCodes {
 public:
  // For chunks of `owners` ranks, each of which sends codes of every chunk.
  RegionCodes(const CodedSpec& spec, int64_t owners, at::Device device);

  const CodedSpec& spec() const { return spec_; }
  at::Device device() const { return device_; }
  bool works_on_parts() const { return writer_->works_on_parts(); }

  // Encodes to `payload`, a chunk for each owner. `residual`: fp32, of all elements, or undefined.
  void encode(const std::vector<ops::Item>& items, const at::Tensor& residual,
              const at::Tensor& payload, const ops::Encoding& how) const;
  // Encodes flags. Those of owner r begin at element r * stride of `flags`; 0: all owners get the
  // same flags.
  void encode_flags(const at::Tensor& flags, int64_t stride, const at::Tensor& payload) const;
  // Sums `payload`, one chunk from each owner, at places in that chunk: in fp32, rounded to the
  // tensors' dtype once.
  void sum(const at::Tensor& payload, const std::vector<ops::Item>& items, bool accumulate) const;
  void sum_flags(const at::Tensor& payload, const at::Tensor& flags) const;

 private:
  CodedSpec spec_;
  int64_t owners_;
  at::Device device_;
  std::shared_ptr<Coder> writer_;  // of all chunks
  std::shared_ptr<Coder> reader_;  // of one
};

// The residual of the part of a flat buffer that a rank codes, and what it has of the others'
// parts: see [Note: residuals of a shard] in hierarchical.cpp.
class ShardResidual {
 public:
  // Returns a rank's own part of a flat buffer.
  using Part = std::function<at::Tensor(const at::Tensor& flat)>;
  explicit ShardResidual(Part part) : part_(std::move(part)) {}

  // `own`: of that part. Returns both, fp32 [numel]; undefined without.
  at::Tensor all(const at::Tensor& own, int64_t numel) const;
  // Keeps `flat` as both, and may change it.
  void load(const at::Tensor& own, const at::Tensor& flat);
  int64_t bytes(const at::Tensor& own) const;
  // Returns and forgets what the next gradients take along; undefined: nothing.
  at::Tensor take() { return std::exchange(others_, at::Tensor()); }

 private:
  Part part_;
  at::Tensor others_;
};

}  // namespace fastsync::engine
