// What a unit sends where its shares, or its gradients, travel as codes of a wire format.
//
// [Note: codes of units]
// Each share begins with a block of the format, so that a rank's chunk is coded as one run, and is
// one message:
//
//   gather   the code of a rank's shard  ->  all ranks  ->  each decodes all, its own too
//   reduce   codes of each rank's gradients, and used flags  ->  that rank
//              ->  decodes, its own too, and adds up in fp32
//
// So all ranks compute with the same bits, and a sum does not depend on who makes it. The shard is
// never rounded: optimizers update it, and each gather codes it anew. Nothing of what coding loses
// is kept for a later step. That would take a whole gradient on each rank, which units are there to
// avoid.
//
// A block with NaN, infinity, or what is too large for its scale decodes to NaN everywhere
// (../kernels/codec.h), so whoever would get one such element without codes gets at least that one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "../comm/collective.h"
#include "../ops/items.h"
#include "../transport/coded_spec.h"
#include "../transport/region_codes.h"

namespace fastsync::engine {

class UnitCodes {
 public:
  // `spec`: of one rank's chunk. `tag`: of its messages, where the backend has these.
  UnitCodes(const CodedSpec& spec, std::shared_ptr<comm::Collective> ranks, at::Device device,
            int tag);

  int64_t chunk_numel() const { return spec().chunk_numel; }
  // Of chunks of all ranks: what each buffer here has.
  int64_t bytes() const { return ranks_->size() * spec().chunk_bytes; }
  int64_t sent_bytes() const { return (ranks_->size() - 1) * spec().chunk_bytes; }

  // Codes `shard` to this rank's place among `chunks`, and has the others' come to theirs.
  std::unique_ptr<comm::InFlight> gather(const at::Tensor& shard, const at::Tensor& chunks) const;
  // Elements of `chunks`, those of one rank after those of another.
  void decode(const std::vector<ops::Item>& items, const at::Tensor& chunks) const;

  // Gradients at their places in the chunks of all ranks, and what tells everybody whether this
  // rank has them.
  void encode(const std::vector<ops::Item>& items, const std::vector<float>& used,
              const at::Tensor& chunks, const ops::Encoding& how) const;
  // Chunk r of `sent` goes to rank r; in `received`, chunk r came from it.
  std::unique_ptr<comm::InFlight> scatter(const at::Tensor& received, const at::Tensor& sent) const;
  // What all ranks have sent, at places in this rank's chunk; and their flags.
  void sum(const at::Tensor& received, const std::vector<ops::Item>& items,
           const at::Tensor& flags) const;

  uint64_t seed_of(uint64_t step) const { return spec().seed_of(step); }

 private:
  const CodedSpec& spec() const { return codes_.spec(); }
  at::Tensor chunk(const at::Tensor& chunks, int rank) const;
  std::unique_ptr<comm::InFlight> exchange(const at::Tensor& received, const at::Tensor& sent,
                                           bool same) const;

  RegionCodes codes_;
  std::shared_ptr<comm::Collective> ranks_;
  at::Device device_;
  int tag_;
};

}  // namespace fastsync::engine
