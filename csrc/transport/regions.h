// Reduce-scatter in the form that the wire requires: the parts of gradients that a rank owns are
// sent to it and added up there.
//
//   plain         pack ─▶ each part to its owner ─▶ add up
//   coded         encode ─▶ all-to-all of chunks ─▶ decode and add up
//   hierarchical  pack as fp32 ─▶ reduce-scatter in the node ─▶ encode
//                   ─▶ all-to-all between nodes ─▶ decode and add up
//
// The coded forms are the first halves of the all-reduce forms (coded.cpp, hierarchical.cpp), so a
// gradient is rounded once, and an average not at all: owners add up in fp32.
//
// [Note: chunks]
// The data is cut into chunks of equal size, one for each rank. The rank's parts lie there one
// after the other, each at the start of a block of the wire's format, and flags follow. Which
// elements of a parameter a rank owns does not depend on the wire.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "codes.h"
#include "transport.h"

namespace fastsync::engine {

// Consecutive elements of a slot, in the order of its memory, that one rank owns.
struct RegionPart {
  size_t slot = 0;
  int64_t chunk = 0;
  int64_t begin = 0;  // element of the slot
  int64_t numel = 0;
  int64_t place = 0;  // element of the chunk
};

struct RegionLayout {
  int64_t chunks = 0;
  int64_t mine = 0;   // this rank's chunk
  int64_t numel = 0;  // elements of a chunk
  int64_t flags = 0;  // floats that travel with each
};

class Regions {
 public:
  virtual ~Regions() = default;

  // The place of a part for take().
  virtual ops::SlotLayout place_of(const RegionPart& part) const = 0;
  // Whether this rank's own part of its gradients must not be taken: the caller adds it to the
  // parts that other ranks send.
  virtual bool leaves_own() const { return false; }
  // Whether take() may come more than once.
  virtual bool works_on_parts() const { return true; }
  // Takes parts of gradients, scaled, until close(); `flags` are summed over ranks exactly.
  virtual void take(const std::vector<ops::Item>& items, const Packing& how) = 0;
  virtual void close(const std::vector<float>& flags, const Packing& how) = 0;
  virtual std::unique_ptr<comm::InFlight> launch() = 0;

  // Called after the end of the launched collective: write the sums over ranks, of flags, and of
  // parts at their places in this rank's chunk. With `accumulate` they are added to the tensors.
  virtual void sum_flags(const at::Tensor& flags) const = 0;
  virtual void sum(const std::vector<ops::Item>& items, bool accumulate) const = 0;
  // Releases the step's buffers; `in_flight`: collectives may still write to them.
  virtual void end(bool in_flight) = 0;

  // The bytes of a step: see transport.h.
  virtual int64_t bytes() const = 0;
  virtual int64_t sent_bytes() const = 0;
  virtual int64_t between_nodes_bytes() const { return 0; }

  // The residual of error feedback, fp32 [chunks * numel], the parts at their places; undefined
  // without. Its own memory, or a copy.
  virtual at::Tensor residual() const { return {}; }
  // Replaces residual(), and may be its result, changed.
  virtual void load_residual(const at::Tensor& /*flat*/) {}
  virtual int64_t residual_bytes() const { return 0; }
};

// In the form that `coded` requires; null: plain. The chunks belong to the ranks of
// `routes.shards`, in their order; in the hierarchical form to the ranks at the first place of each
// node, then to those at the second, and the pipelines' first two process groups are in the node
// and between nodes. `like`: a shard.
std::unique_ptr<Regions> make_regions(const RegionLayout& layout, const at::Tensor& like,
                                      const CodedSpec* coded, const Routes& routes);

}  // namespace fastsync::engine
