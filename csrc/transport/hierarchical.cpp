#include "hierarchical.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "../ops/ops.h"
#include "code_buffers.h"

namespace fastsync::engine {
namespace {

using InFlights = std::vector<std::unique_ptr<comm::InFlight>>;

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

// Both forms between nodes use the same stages, so that a pipeline of one form never overtakes one
// of the other.
class NodePiece final : public comm::Stages {
 public:
  NodePiece(std::shared_ptr<const NodeBuffers> buffers, int64_t piece)
      : buffers_(std::move(buffers)), piece_(piece) {}

  size_t count() const override { return 4; }

  std::unique_ptr<comm::InFlight> start(size_t index, comm::Collective& group) override {
    const at::NoGradGuard no_grad;
    switch (index) {
      case 0:
        return with_flags([&](const Floats& floats) { return floats.scatter(group, piece_); });
      case 1:
        buffers_->encode(piece_);
        if (buffers_->spec().gather) return comm::all_of({});
        return group.all_to_all(codes().received, codes().sent);
      case 2:
        if (buffers_->spec().gather) return group.all_gather(codes().received, codes().sent);
        buffers_->codes.sum(piece_);
        return group.all_gather(codes().received, codes().sum);
      case 3:
        buffers_->decode(piece_);
        return with_flags([&](const Floats& floats) { return floats.gather(group, piece_); });
      default:
        return nullptr;
    }
  }

 private:
  const CodePiece& codes() const { return buffers_->codes.pieces[static_cast<size_t>(piece_)]; }

  template <typename Start>
  std::unique_ptr<comm::InFlight> with_flags(const Start& start) const {
    InFlights started;
    started.push_back(start(buffers_->values));
    if (buffers_->has_flags()) started.push_back(start(buffers_->flags));
    return comm::all_of(std::move(started));
  }

  std::shared_ptr<const NodeBuffers> buffers_;
  int64_t piece_;
};

class Hierarchical final : public Coding {
 public:
  Hierarchical(const CodedSpec& spec, at::Device device)
      : buffers_(std::make_shared<NodeBuffers>(spec, device)) {}

  void take(const std::vector<ops::Item>& items, Taking how) override {
    ops::pack(items, buffers_->values.packed, how.scale);
  }

  void pack(const std::vector<ops::Item>& items, const std::vector<float>& flags,
            Taking how) override {
    const at::NoGradGuard no_grad;
    if (!items.empty()) take(items, how);
    buffers_->codes.seed = buffers_->spec().seed_of(how.step);
    if (carried_.defined()) buffers_->values.packed.add_(std::exchange(carried_, at::Tensor()));
    if (!buffers_->has_flags()) return;
    write_flags(flags, buffers_->flags.packed);
    add_to_first(buffers_->flags.packed, how.infinities);
  }

  // Averages are complete only after the last stage.
  bool works_on_parts() const override { return false; }

  std::unique_ptr<comm::InFlight> launch(comm::Pipelines& pipelines,
                                         Delivery /*delivery*/) override {
    InFlights pieces;
    for (int64_t i = 0; i < buffers_->spec().pieces; ++i) {
      pieces.push_back(
          pipelines.run(std::make_shared<NodePiece>(buffers_, i), buffers_->codes.device));
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
    if (!buffers_->codes.residual.defined()) return {};
    const at::NoGradGuard no_grad;
    const at::Tensor& like = buffers_->values.packed;
    const at::Tensor flat = carried_.defined()
                                ? ops::copy_of(carried_)
                                : ops::make_flat(like.numel(), at::kFloat, like.device());
    my_shard(flat).add_(buffers_->codes.residual.view({buffers_->spec().pieces, -1}));
    return flat;
  }

  void load_residual(const at::Tensor& flat) override {
    const at::NoGradGuard no_grad;
    const at::Tensor mine = my_shard(flat);
    buffers_->codes.residual.view({buffers_->spec().pieces, -1}).copy_(mine);
    mine.zero_();
    carried_ = flat.any().item<bool>() ? flat : at::Tensor();
  }

  int64_t residual_bytes() const override {
    if (!buffers_->codes.residual.defined()) return 0;
    const size_t carried = carried_.defined() ? carried_.nbytes() : 0;
    return static_cast<int64_t>(buffers_->codes.residual.nbytes() + carried);
  }

 private:
  // [pieces, elements of a shard]
  at::Tensor my_shard(const at::Tensor& flat) const {
    const CodedSpec& spec = buffers_->spec();
    return flat.view({spec.pieces, spec.node_ranks, -1}).select(1, spec.node_rank);
  }

  std::shared_ptr<NodeBuffers> buffers_;
  at::Tensor carried_;  // residual of other ranks' shards; see [Note: residuals of a shard]
};

}  // namespace

std::unique_ptr<Coding> make_hierarchical(const CodedSpec& spec, at::Device device) {
  return std::make_unique<Hierarchical>(spec, device);
}

}  // namespace fastsync::engine
