// Gradients summed in full precision inside a node, and coded between nodes.
//
//   pack ─▶ reduce-scatter in the node ─▶ encode my shard
//        ─▶ two-shot or gather among the ranks with my place in all nodes
//        ─▶ decode my shard ─▶ all-gather in the node ─▶ unpack
//
// Of L ranks in each of n nodes every one codes and sends 1/L of the bucket: 2 (n-1)/n of the coded
// bucket over L leave a rank for other nodes, and no gradient is rounded before its node's sum.
// ZeRO++ (Wang et al., 2023) and BytePS cut the way of gradients at the same place.
//
// [Note: residuals of a shard]
// A rank loses precision, and so keeps a residual, in its own shard only. A new plan moves shards
// between ranks; the residual that a rank holds of others' shards then goes with its next
// gradients, in full precision, to the rank that codes them.
#include <ATen/core/grad_mode.h>

#include <utility>

#include "coding.h"

namespace fastsync::engine {
namespace {

using InFlightPtr = std::unique_ptr<comm::InFlight>;
using InFlights = std::vector<InFlightPtr>;

// Floats in flight: the packed gradients of all ranks, my shard of their sum, and the averages.
// They are cut into pieces, and each piece into shards. Averages have a buffer of their own: what
// is not finite may reach the gaps between slots, and must not be sent from there.
struct Floats {
  Floats(int64_t pieces, int64_t ranks, int64_t each, at::Device device)
      : shard_numel(each), ranks_(ranks) {
    packed = ops::make_flat(pieces * ranks * each, at::kFloat, device);
    shard = ops::make_flat(pieces * each, at::kFloat, device);
    averaged = ops::make_flat(pieces * ranks * each, at::kFloat, device);
  }

  at::Tensor shard_of(int64_t piece) const {
    return shard.narrow(0, piece * shard_numel, shard_numel);
  }
  std::unique_ptr<comm::InFlight> scatter(comm::Collective& node, int64_t piece) const {
    return node.reduce_scatter(shard_of(piece), whole(packed, piece));
  }
  std::unique_ptr<comm::InFlight> gather(comm::Collective& node, int64_t piece) const {
    return node.all_gather(whole(averaged, piece), shard_of(piece));
  }

  int64_t shard_numel;
  at::Tensor packed;
  at::Tensor shard;
  at::Tensor averaged;

 private:
  at::Tensor whole(const at::Tensor& flat, int64_t piece) const {
    const int64_t numel = ranks_ * shard_numel;
    return flat.narrow(0, piece * numel, numel);
  }

  int64_t ranks_;
};

// Reduce-scatter inside the node, codes between nodes, all-gather inside the node. Codes are of my
// shard.
struct NodeBuffers {
  NodeBuffers(const CodedSpec& spec, at::Device device)
      : codes(spec, static_cast<int>(spec.node), static_cast<int>(spec.nodes), device),
        values(spec.pieces, spec.node_ranks, codes.piece_numel(), device),
        flags(spec.pieces, spec.node_ranks, codes.flags_plan.numel / spec.pieces, device) {}

  const CodedSpec& spec() const { return codes.spec; }
  bool has_flags() const { return codes.flags_coder != nullptr; }

  void encode(int64_t piece) const {
    ops::Encoding how = codes.encoding();
    const ops::SlotLayout flag_run = run_of(flags, piece);
    if (has_flags()) {
      codes.flags_coder->encode({{flags.shard_of(piece), &flag_run}}, at::Tensor(), codes.sent,
                                how);
    }
    const ops::SlotLayout run = run_of(values, piece);
    how.seed = codes.seed;
    codes.encode({{values.shard_of(piece), &run}}, how);
  }

  void decode(int64_t piece) const {
    decode_with(*codes.coder, values, piece);
    if (has_flags()) decode_with(*codes.flags_coder, flags, piece);
  }

  CodeBuffers codes;
  Floats values;
  Floats flags;

 private:
  static ops::SlotLayout run_of(const Floats& floats, int64_t piece) {
    return ops::SlotLayout::run(piece * floats.shard_numel, floats.shard_numel);
  }

  void decode_with(Coder& coder, const Floats& floats, int64_t piece) const {
    const ops::SlotLayout run = run_of(floats, piece);
    coder.decode({{floats.shard_of(piece), &run}}, codes.received, codes.sources());
  }
};

// Starts the scattering or gathering of values, and of flags where some travel.
template <typename Start>
InFlightPtr with_flags(const NodeBuffers& buffers, const Start& start) {
  InFlights started;
  started.push_back(start(buffers.values));
  if (buffers.has_flags()) started.push_back(start(buffers.flags));
  return comm::all_of(std::move(started));
}

constexpr size_t kStages = 4;

// Starts a stage of one piece. Both forms between nodes use the same stages, so that a pipeline of
// one form never overtakes one of the other.
InFlightPtr start_stage(const NodeBuffers& buffers, int64_t index, size_t stage,
                        comm::Collective& group) {
  const at::NoGradGuard no_grad;
  const CodePiece& piece = buffers.codes.pieces[static_cast<size_t>(index)];
  const bool gather = buffers.spec().gather;
  switch (stage) {
    case 0:
      return with_flags(buffers, [&](const Floats& all) { return all.scatter(group, index); });
    case 1:
      buffers.encode(index);
      return gather ? comm::all_of({}) : group.all_to_all(piece.received, piece.sent);
    case 2:
      if (gather) return group.all_gather(piece.received, piece.sent);
      buffers.codes.sum(index);
      return group.all_gather(piece.received, piece.sum);
    case 3:
      buffers.decode(index);
      return with_flags(buffers, [&](const Floats& all) { return all.gather(group, index); });
    default:
      return nullptr;
  }
}

class Hierarchical final : public Coding {
 public:
  Hierarchical(const CodedSpec& spec, at::Device device)
      : buffers_(std::make_shared<NodeBuffers>(spec, device)),
        residual_([spec](const at::Tensor& flat) {
          // [pieces, elements of a shard]
          return flat.view({spec.pieces, spec.node_ranks, -1}).select(1, spec.node_rank);
        }) {}

  void take(const std::vector<ops::Item>& items, Taking how) override {
    ops::pack(items, buffers_->values.packed, how.scale);
  }

  void pack(const std::vector<ops::Item>& items, const std::vector<float>& flags,
            Taking how) override {
    const at::NoGradGuard no_grad;
    if (!items.empty()) take(items, how);
    buffers_->codes.seed = buffers_->spec().seed_of(how.step);
    const at::Tensor carried = residual_.take();
    if (carried.defined()) buffers_->values.packed.add_(carried);
    if (!buffers_->has_flags()) return;
    write_flags(flags, buffers_->flags.packed);
    add_to_first(buffers_->flags.packed, how.infinities);
  }

  // Averages are complete only after the last stage.
  bool works_on_parts() const override { return false; }

  InFlightPtr launch(comm::Pipelines& pipelines, Delivery /*delivery*/) override {
    InFlights pieces;
    for (int64_t i = 0; i < buffers_->spec().pieces; ++i) {
      const auto stages = [buffers = buffers_, i](size_t stage, comm::Collective& group) {
        return start_stage(*buffers, i, stage, group);
      };
      pieces.push_back(pipelines.run(kStages, stages, buffers_->codes.device));
    }
    return comm::all_of(std::move(pieces));
  }

  void unpack(const std::vector<ops::Item>& items) override {
    if (!items.empty()) ops::unpack(items, buffers_->values.averaged, 1.0, false);
  }

  bool has_flags() const override { return buffers_->has_flags(); }
  at::Tensor flags() const override { return buffers_->flags.averaged; }
  at::Tensor flag(int64_t index) const override { return flags().narrow(0, index, 1); }

  void abandon() override {
    const CodeBuffers& old = buffers_->codes;
    auto fresh = std::make_shared<NodeBuffers>(old.spec, old.device);
    if (old.residual.defined()) fresh->codes.residual = ops::copy_of(old.residual);
    buffers_ = std::move(fresh);
  }

  int64_t bytes() const override {
    return static_cast<int64_t>(buffers_->values.packed.nbytes() + buffers_->flags.packed.nbytes());
  }
  int64_t sent_bytes(const comm::Pipelines& pipelines) const override {
    const int64_t in_node = buffers_->spec().node_ranks;
    return pipelines.leaving(0, 2 * bytes() * (in_node - 1) / in_node) + between_nodes_bytes();
  }
  int64_t between_nodes_bytes() const override {
    const int64_t others = buffers_->spec().nodes - 1;
    const int64_t shard = buffers_->codes.pieces.front().sent.numel() * buffers_->spec().pieces;
    return buffers_->spec().gather ? others * shard : 2 * others * shard / buffers_->spec().nodes;
  }

  at::Tensor residual() const override {
    return residual_.all(buffers_->codes.residual, buffers_->values.packed.numel());
  }
  void load_residual(const at::Tensor& flat) override {
    residual_.load(buffers_->codes.residual, flat);
  }
  int64_t residual_bytes() const override { return residual_.bytes(buffers_->codes.residual); }

 private:
  std::shared_ptr<NodeBuffers> buffers_;
  ShardResidual residual_;
};

}  // namespace

std::unique_ptr<Coding> make_hierarchical(const CodedSpec& spec, at::Device device) {
  return std::make_unique<Hierarchical>(spec, device);
}

}  // namespace fastsync::engine
