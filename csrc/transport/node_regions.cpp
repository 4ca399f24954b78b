#include <ATen/core/grad_mode.h>

#include <utility>

#include "../ops/buffers.h"
#include "../ops/ops.h"
#include "coding.h"
#include "region_codes.h"

namespace fastsync::engine {
namespace {

// A step's buffers. A shelf holds the chunks of the ranks at one place in their nodes: a chunk for
// each node, in fp32, with flags.
struct NodeStep {
  at::Tensor packed;    // shelf by shelf
  at::Tensor shelves;   // mine, from each rank of my node; the first becomes their sum
  at::Tensor sent;      // codes of my shelf
  at::Tensor received;  // of my chunk, from each node
  uint64_t seed = 0;
};

// State that collectives in flight share with the bucket, and may need after its end.
struct NodeCodes {
  NodeCodes(const RegionLayout& all, const CodedSpec& spec, at::Device device)
      : layout(all), codes(spec, spec.nodes, device) {}

  int64_t stride() const { return layout.numel + codes.spec().flags_per_chunk; }
  int64_t shelf() const { return codes.spec().nodes * stride(); }

  at::Tensor sum(const NodeStep& step) const {
    const at::Tensor total = step.shelves.narrow(0, 0, shelf());
    const int64_t ranks = step.shelves.numel() / shelf();
    for (int64_t r = 1; r < ranks; ++r) {
      const auto term = ops::SlotLayout::run(r * shelf(), shelf());
      ops::unpack({{total, &term}}, step.shelves, 1.0, /*accumulate=*/true);
    }
    return total;
  }

  void encode(const NodeStep& step) const {
    const at::Tensor total = sum(step);
    std::vector<ops::SlotLayout> layouts;
    std::vector<ops::Item> items;
    for (int64_t i = 0; i < codes.spec().nodes; ++i) {
      layouts.push_back(ops::SlotLayout::run(i * layout.numel, layout.numel));
    }
    for (int64_t i = 0; i < codes.spec().nodes; ++i) {
      const auto chunk = ops::SlotLayout::run(i * stride(), layout.numel);
      items.push_back({ops::view_of(total, chunk, at::kFloat), &layouts[static_cast<size_t>(i)]});
    }
    codes.encode(items, residual, step.sent, {1.0, step.seed});
    codes.encode_flags(total.narrow(0, layout.numel, total.numel() - layout.numel), stride(),
                       step.sent);
  }

  RegionLayout layout;
  RegionCodes codes;
  at::Tensor residual;  // of my shelf, chunk by chunk
};

class NodeStages final : public comm::Stages {
 public:
  NodeStages(std::shared_ptr<const NodeCodes> codes, NodeStep step)
      : codes_(std::move(codes)), step_(std::move(step)) {}

  size_t count() const override { return 2; }

  std::unique_ptr<comm::InFlight> start(size_t index, comm::Collective& group) override {
    const at::NoGradGuard no_grad;
    if (index == 0) {
      // Gloo's reduce-scatter would reduce all shelves everywhere.
      return step_.packed.is_cpu() ? group.all_to_all(step_.shelves, step_.packed)
                                   : group.reduce_scatter(step_.shelves, step_.packed);
    }
    if (index > 1) return nullptr;
    codes_->encode(step_);
    return group.all_to_all(step_.received, step_.sent);
  }

 private:
  std::shared_ptr<const NodeCodes> codes_;
  NodeStep step_;
};

class NodeRegions final : public Regions {
 public:
  NodeRegions(const RegionLayout& layout, const CodedSpec& spec, at::Device device,
              std::shared_ptr<comm::Pipelines> pipelines, std::shared_ptr<ops::BufferPool> pool)
      : codes_(std::make_shared<NodeCodes>(layout, spec, device)),
        pipelines_(std::move(pipelines)),
        pool_(std::move(pool)) {
    if (!spec.error_feedback) return;
    codes_->residual = ops::make_flat(spec.nodes * layout.numel, at::kFloat, device);
  }

  ops::SlotLayout place_of(const RegionPart& part) const override {
    return ops::SlotLayout::run(part.chunk * codes_->stride() + part.place, part.numel);
  }

  void take(const std::vector<ops::Item>& items, const Packing& how) override {
    ops::pack(items, packed(), how.scale);
  }

  void close(const std::vector<float>& flags, const Packing& how) override {
    const at::NoGradGuard no_grad;
    const RegionLayout& layout = codes_->layout;
    const at::Tensor chunks = packed().view({layout.chunks, codes_->stride()});
    chunks.narrow(1, layout.numel, spec().flags_per_chunk)
        .copy_(flags_on(packed().device(), flags, spec().flags_per_chunk, how.infinities));
    if (carried_.defined()) {
      const at::Tensor carried = std::exchange(carried_, at::Tensor());
      chunks.narrow(1, 0, layout.numel).add_(carried.view({layout.chunks, layout.numel}));
    }
    step_.seed = spec().seed_of(how.step);
  }

  std::unique_ptr<comm::InFlight> launch() override {
    const at::Device device = codes_->codes.device();
    const int64_t ranks = device.is_cpu() ? spec().node_ranks : 1;
    step_.shelves = pool_->take(ranks * codes_->shelf(), at::kFloat, device);
    step_.sent = pool_->take(spec().nodes * spec().chunk_bytes, at::kByte, device);
    step_.received = pool_->take(spec().nodes * spec().chunk_bytes, at::kByte, device);
    return pipelines_->run(std::make_shared<NodeStages>(codes_, step_), device);
  }

  void sum_flags(const at::Tensor& flags) const override {
    codes_->codes.sum_flags(step_.received, flags);
  }
  void sum(const std::vector<ops::Item>& items, bool accumulate) const override {
    codes_->codes.sum(step_.received, items, accumulate);
  }

  // A pipeline in flight still writes to the residual of its codes, too.
  void end(bool in_flight) override {
    const NodeStep step = std::exchange(step_, NodeStep{});
    for (const at::Tensor& buffer : {step.packed, step.shelves, step.sent, step.received}) {
      pool_->end(buffer, in_flight);
    }
    if (!in_flight) return;
    auto fresh = std::make_shared<NodeCodes>(codes_->layout, spec(), codes_->codes.device());
    if (codes_->residual.defined()) fresh->residual = ops::copy_of(codes_->residual);
    codes_ = std::move(fresh);
  }

  int64_t bytes() const override { return spec().node_ranks * shelf_bytes(); }
  int64_t sent_bytes() const override {
    return pipelines_->leaving(0, (spec().node_ranks - 1) * shelf_bytes()) + between_nodes_bytes();
  }
  int64_t between_nodes_bytes() const override { return (spec().nodes - 1) * spec().chunk_bytes; }

  // See [Note: residuals of a shard] in hierarchical.h.
  at::Tensor residual() const override {
    if (!codes_->residual.defined()) return {};
    const at::NoGradGuard no_grad;
    const RegionLayout& layout = codes_->layout;
    const at::Tensor flat = carried_.defined() ? ops::copy_of(carried_)
                                               : ops::make_flat(layout.chunks * layout.numel,
                                                                at::kFloat, codes_->codes.device());
    my_shelf(flat).add_(codes_->residual);
    return flat;
  }

  void load_residual(const at::Tensor& flat) override {
    const at::NoGradGuard no_grad;
    codes_->residual.copy_(my_shelf(flat));
    my_shelf(flat).zero_();
    carried_ = flat.any().item<bool>() ? flat : at::Tensor();
  }

  int64_t residual_bytes() const override {
    if (!codes_->residual.defined()) return 0;
    const size_t carried = carried_.defined() ? carried_.nbytes() : 0;
    return static_cast<int64_t>(codes_->residual.nbytes() + carried);
  }

 private:
  const CodedSpec& spec() const { return codes_->codes.spec(); }
  int64_t shelf_bytes() const {
    return codes_->shelf() * static_cast<int64_t>(c10::elementSize(at::kFloat));
  }

  at::Tensor my_shelf(const at::Tensor& flat) const {
    const int64_t numel = spec().nodes * codes_->layout.numel;
    return flat.narrow(0, spec().node_rank * numel, numel);
  }

  // The gaps between the parts are zeros, because they lie in the same blocks.
  const at::Tensor& packed() {
    if (!step_.packed.defined()) {
      const at::NoGradGuard no_grad;
      step_.packed =
          pool_->take(spec().node_ranks * codes_->shelf(), at::kFloat, codes_->codes.device());
      step_.packed.zero_();
    }
    return step_.packed;
  }

  std::shared_ptr<NodeCodes> codes_;
  std::shared_ptr<comm::Pipelines> pipelines_;
  std::shared_ptr<ops::BufferPool> pool_;
  NodeStep step_;
  at::Tensor carried_;  // residual of other ranks' shelves
};

}  // namespace

std::unique_ptr<Regions> make_node_regions(const RegionLayout& layout, const CodedSpec& spec,
                                           at::Device device,
                                           std::shared_ptr<comm::Pipelines> pipelines,
                                           std::shared_ptr<ops::BufferPool> pool) {
  return std::make_unique<NodeRegions>(layout, spec, device, std::move(pipelines), std::move(pool));
}

}  // namespace fastsync::engine
