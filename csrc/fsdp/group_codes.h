// The messages of a unit whose shares or gradients travel as codes of a wire format.
//
// [Note: codes of units]
// Each share begins with a block of the format, so that a rank's chunk is coded as one run, and is
// one message:
//
//   gather   the code of a rank's shard  ->  all ranks  ->  each decodes all, its own too
//   reduce   codes of each rank's gradients, and used flags  ->  that rank
//              ->  decodes, its own too, and adds up in fp32
//
// So all ranks compute with the same bits, and a sum does not depend on the rank that makes it. The
// shard is never rounded: optimizers update it, and each gather codes it anew. There is no error
// feedback. It would take an unsharded gradient on each rank, which units exist to avoid.
//
// A block with NaN, infinity, or an element too large for its scale decodes to NaN everywhere
// (../kernels/codec.h), so a rank that would receive such an element without codes receives it with
// codes, too.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "comm/collective.h"
#include "ops/items.h"
#include "transport/codes.h"

namespace fastsync::engine {

class UnitCodes {
 public:
  // `spec`: of one rank's chunk. `tag`: of its messages, if the backend has messages.
  UnitCodes(const CodedSpec& spec, std::shared_ptr<comm::Collective> ranks, at::Device device,
            int tag);

  int64_t chunk_numel() const { return spec().chunk_numel; }
  // Returns the bytes of the chunks of all ranks, the size of each buffer here.
  int64_t bytes() const { return ranks_->size() * spec().chunk_bytes; }
  int64_t sent_bytes() const { return (ranks_->size() - 1) * spec().chunk_bytes; }

  // Encodes `shard` to this rank's place among `chunks`, and receives the other ranks' chunks in
  // theirs.
  std::unique_ptr<comm::InFlight> gather(const at::Tensor& shard, const at::Tensor& chunks) const;
  // Decodes elements of `chunks`, which hold those of one rank after those of another.
  void decode(const std::vector<ops::Item>& items, const at::Tensor& chunks) const;

  // Encodes gradients to their places in the chunks of all ranks, with flags that say which of them
  // this rank has.
  void encode(const std::vector<ops::Item>& items, const std::vector<float>& used,
              const at::Tensor& chunks, const ops::Encoding& how) const;
  // Chunk r of `sent` goes to rank r; in `received`, chunk r came from it.
  std::unique_ptr<comm::InFlight> scatter(const at::Tensor& received, const at::Tensor& sent) const;
  // Sums the chunks of all ranks, into items placed in this rank's chunk, and their flags.
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
