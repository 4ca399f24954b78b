// The coded form of a bucket's gradients: block formats, users' codecs, top-k. A Coding owns the
// buffers and makes the pipeline of collectives that carries them; the transport in pipelined.cpp
// gives it gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "../ops/ops.h"
#include "codes.h"
#include "comm/pipeline.h"

namespace fastsync::engine {

// Gradients that averages are written into as they arrive, and their layouts. Kept alive until
// then.
struct Delivery {
  // Refer to the layouts here.
  std::vector<ops::Item> items() const {
    std::vector<ops::Item> all;
    for (size_t i = 0; i < tensors.size(); ++i) all.push_back({tensors[i], &layouts[i]});
    return all;
  }

  std::vector<at::Tensor> tensors;
  std::vector<ops::SlotLayout> layouts;
};

// How a step takes its gradients.
struct Taking {
  ops::Scale scale;
  uint64_t step = 0;  // of the whole training, restarts included: random numbers follow from it
  at::Tensor infinities = {};  // terms to add to the flags, as in Packing
};

// Writes flags to `to`, fp32 [numel], and zeros after them. They are values of a kernel's
// arguments: a copy from the host would wait for the stream of the backward, and could not be
// captured.
void write_flags(const std::vector<float>& flags, const at::Tensor& to);
// The same in a tensor of their own, with `added` as in add_to_first().
at::Tensor flags_on(at::Device device, const std::vector<float>& flags, int64_t numel,
                    const at::Tensor& added = {});
// Adds terms to the first flags; undefined: nothing.
void add_to_first(const at::Tensor& flags, const at::Tensor& terms);
// Adds flags for a kernel to fill a flat buffer with, the first at element `begin`: runs of equal
// ones.
void add_flags(ops::ItemList& items, const std::vector<float>& flags, int64_t begin);

class Coding {
 public:
  virtual ~Coding() = default;

  // Takes gradients, scaled. pack() comes once per step and takes the last of them. The items'
  // layouts must live until launch(), which may read them; `flags` are summed over ranks exactly.
  virtual void take(const std::vector<ops::Item>& items, Taking how) = 0;
  virtual void pack(const std::vector<ops::Item>& items, const std::vector<float>& flags,
                    Taking how) = 0;
  // Whether take() may be called for single gradients ahead of pack(), and launch() may deliver.
  virtual bool works_on_parts() const = 0;
  // Sends the bucket. Writes the averages of `delivery` while others are still in flight; its
  // tensors must be in their slots' order.
  virtual std::unique_ptr<comm::InFlight> launch(comm::Pipelines& pipelines, Delivery delivery) = 0;
  // Writes averages; only after the end of what launch() returned.
  virtual void unpack(const std::vector<ops::Item>& items) = 0;
  virtual bool has_flags() const = 0;
  virtual at::Tensor flags() const = 0;
  virtual at::Tensor flag(int64_t index) const = 0;
  // Leaves the buffers to collectives in flight; the next step gets others.
  virtual void abandon() = 0;

  // Bytes that this rank hands to collectives, and that leave it, in one step.
  virtual int64_t bytes() const = 0;
  virtual int64_t sent_bytes(const comm::Pipelines& pipelines) const = 0;
  // The bytes among these that leave this rank's node, if the form distinguishes nodes.
  virtual int64_t between_nodes_bytes() const { return 0; }
  // The residual of the averages, fp32 in the flat buffer's order; undefined without. The coding's
  // own memory, or a copy.
  virtual at::Tensor residual() const = 0;
  // Replaces residual(), and may be its result, changed.
  virtual void load_residual(const at::Tensor& flat) = 0;
  virtual int64_t residual_bytes() const = 0;
};

// The two-shot or the gather form, between `ranks` ranks, of which this is number `rank`.
std::unique_ptr<Coding> make_coded(const CodedSpec& spec, int rank, int ranks, at::Device device);
// The hierarchical form. Needs pipelines of four process groups: in the node, between nodes,
// between nodes, in the node.
std::unique_ptr<Coding> make_hierarchical(const CodedSpec& spec, at::Device device);

}  // namespace fastsync::engine
