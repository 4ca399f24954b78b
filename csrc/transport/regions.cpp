#include "regions.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "../check.h"
#include "coding.h"

namespace fastsync::engine {
namespace {

constexpr int64_t kChunkAlignment = 16;  // elements

// Between CPUs each rank sends the others their chunks and keeps its own: Gloo's reduce-scatter
// would reduce all of them everywhere. On devices the backend sums.
class PlainRegions final : public Regions {
 public:
  PlainRegions(const RegionLayout& layout, at::TensorOptions like, const Routes& routes)
      : layout_(layout), like_(like), group_(routes.shards), pool_(routes.pool) {
    stride_ =
        (layout_.numel + layout_.flags + kChunkAlignment - 1) / kChunkAlignment * kChunkAlignment;
  }

  bool leaves_own() const override { return like_.device().is_cpu(); }

  ops::SlotLayout place_of(const RegionPart& part) const override {
    const bool later = leaves_own() && part.chunk > layout_.mine;
    return ops::SlotLayout::run((part.chunk - (later ? 1 : 0)) * stride_ + part.place, part.numel);
  }

  void take(const std::vector<ops::Item>& items, const Packing& how) override {
    if (!items.empty()) ops::pack(items, sent(), how.scale);
  }

  void close(const std::vector<float>& flags, const Packing& how) override {
    ops::ItemList items;
    for (int64_t chunk = 0; chunk < sent_chunks(); ++chunk) {
      add_flags(items, flags, chunk * stride_ + layout_.numel);
    }
    take(items.items(), how);
    if (how.infinities.defined()) add_to_flags(how.infinities);
    if (leaves_own()) own_flags_ = flags;
  }

  std::unique_ptr<comm::InFlight> launch() override {
    if (leaves_own()) {
      incoming_ = group_->all_to_others(sent_, pool_);
      sent_ = at::Tensor();
      return std::make_unique<comm::SharedInFlight>(incoming_);
    }
    sum_ = {ops::run_of(sent_, group_->rank() * stride_, stride_)};  // in place, as devices can
    return group_->reduce_scatter(sum_.front(), sent_);
  }

  void sum_flags(const at::Tensor& flags) const override {
    if (leaves_own()) write_flags(own_flags_, flags);
    const auto after_parts = ops::SlotLayout::run(layout_.numel, layout_.flags);
    sum({{flags, &after_parts}}, /*accumulate=*/leaves_own());
  }

  void sum(const std::vector<ops::Item>& items, bool accumulate) const override {
    if (items.empty()) return;
    for (const at::Tensor& term : leaves_own() ? incoming_->parts() : sum_) {
      ops::unpack(items, term, 1.0, accumulate);
      accumulate = true;
    }
  }

  void end(bool in_flight) override {
    if (incoming_ && !in_flight) incoming_->release();
    incoming_ = nullptr;
    sum_.clear();
    pool_->end(std::exchange(sent_, at::Tensor()), in_flight);
  }

  int64_t bytes() const override { return sent_chunks() * chunk_bytes(); }
  int64_t sent_bytes() const override {
    return group_->leaving((layout_.chunks - 1) * chunk_bytes());
  }

 private:
  at::ScalarType dtype() const { return c10::typeMetaToScalarType(like_.dtype()); }
  int64_t chunk_bytes() const { return stride_ * static_cast<int64_t>(c10::elementSize(dtype())); }
  int64_t sent_chunks() const { return layout_.chunks - (leaves_own() ? 1 : 0); }

  void add_to_flags(const at::Tensor& added) const {
    const at::NoGradGuard no_grad;
    const at::Tensor chunks = sent_.view({sent_chunks(), stride_});
    chunks.narrow(1, layout_.numel, added.numel()).add_(added);
  }

  const at::Tensor& sent() {
    if (!sent_.defined()) sent_ = pool_->take(sent_chunks() * stride_, dtype(), like_.device());
    return sent_;
  }

  RegionLayout layout_;
  at::TensorOptions like_;
  std::shared_ptr<comm::Collective> group_;
  std::shared_ptr<ops::BufferPool> pool_;
  int64_t stride_ = 0;  // elements from chunk to chunk
  std::vector<float> own_flags_;
  at::Tensor sent_;
  std::shared_ptr<comm::Incoming> incoming_;  // data of the other ranks, to add up here
  std::vector<at::Tensor> sum_;               // or the backend's sum, part of `sent_`
};

class CodedRegions final : public Regions {
 public:
  CodedRegions(const RegionLayout& layout, const CodedSpec& spec, at::Device device,
               const Routes& routes)
      : codes_(spec, layout.chunks, device),
        numel_(layout.numel),
        group_(routes.shards),
        pool_(routes.pool) {
    if (spec.error_feedback) {
      residual_ = ops::make_flat(layout.chunks * layout.numel, at::kFloat, device);
    }
  }

  ops::SlotLayout place_of(const RegionPart& part) const override {
    return ops::SlotLayout::run(part.chunk * numel_ + part.place, part.numel);
  }

  bool works_on_parts() const override { return codes_.works_on_parts(); }

  void take(const std::vector<ops::Item>& items, const Packing& how) override {
    codes_.encode(items, residual_, sent(), {how.scale, codes_.spec().seed_of(how.step)});
  }

  void close(const std::vector<float>& flags, const Packing& how) override {
    const at::NoGradGuard no_grad;
    const int64_t numel = codes_.spec().flags_per_chunk;
    codes_.encode_flags(flags_on(codes_.device(), flags, numel, how.infinities), 0, sent());
  }

  std::unique_ptr<comm::InFlight> launch() override {
    received_ = pool_->take(sent_.numel(), at::kByte, codes_.device());
    return group_->all_to_all(received_, sent_);
  }

  void sum_flags(const at::Tensor& flags) const override { codes_.sum_flags(received_, flags); }
  void sum(const std::vector<ops::Item>& items, bool accumulate) const override {
    codes_.sum(received_, items, accumulate);
  }

  void end(bool in_flight) override {
    pool_->end(std::exchange(sent_, at::Tensor()), in_flight);
    pool_->end(std::exchange(received_, at::Tensor()), in_flight);
  }

  int64_t bytes() const override { return group_->size() * codes_.spec().chunk_bytes; }
  int64_t sent_bytes() const override {
    return group_->leaving((group_->size() - 1) * codes_.spec().chunk_bytes);
  }

  at::Tensor residual() const override { return residual_; }
  void load_residual(const at::Tensor& flat) override {
    if (!flat.is_same(residual_)) residual_.copy_(flat);
  }
  int64_t residual_bytes() const override {
    return residual_.defined() ? static_cast<int64_t>(residual_.nbytes()) : 0;
  }

 private:
  const at::Tensor& sent() {
    if (!sent_.defined()) sent_ = pool_->take(bytes(), at::kByte, codes_.device());
    return sent_;
  }

  RegionCodes codes_;
  int64_t numel_;
  std::shared_ptr<comm::Collective> group_;
  std::shared_ptr<ops::BufferPool> pool_;
  at::Tensor residual_;
  at::Tensor sent_;
  at::Tensor received_;
};

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
    ops::ItemList items;
    for (int64_t i = 0; i < codes.spec().nodes; ++i) {
      items.add_run(ops::run_of(total, i * stride(), layout.numel), i * layout.numel, layout.numel);
    }
    codes.encode(items.items(), residual, step.sent, {1.0, step.seed});
    codes.encode_flags(total.narrow(0, layout.numel, total.numel() - layout.numel), stride(),
                       step.sent);
  }

  RegionLayout layout;
  RegionCodes codes;
  at::Tensor residual;  // of my shelf, chunk by chunk
};

// Starts a stage: sums in the node, then codes between nodes.
std::unique_ptr<comm::InFlight> start_stage(const NodeCodes& codes, const NodeStep& step,
                                            size_t stage, comm::Collective& group) {
  const at::NoGradGuard no_grad;
  if (stage == 0) {
    // Gloo's reduce-scatter would reduce all shelves everywhere.
    return step.packed.is_cpu() ? group.all_to_all(step.shelves, step.packed)
                                : group.reduce_scatter(step.shelves, step.packed);
  }
  if (stage > 1) return nullptr;
  codes.encode(step);
  return group.all_to_all(step.received, step.sent);
}

class NodeRegions final : public Regions {
 public:
  NodeRegions(const RegionLayout& layout, const CodedSpec& spec, at::Device device,
              const Routes& routes)
      : codes_(std::make_shared<NodeCodes>(layout, spec, device)),
        pipelines_(routes.pipelines),
        pool_(routes.pool),
        residual_([numel = spec.nodes * layout.numel, place = spec.node_rank](
                      const at::Tensor& flat) { return flat.narrow(0, place * numel, numel); }) {
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
    const at::Tensor carried = residual_.take();
    if (carried.defined()) {
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
    const auto stages = [codes = codes_, step = step_](size_t stage, comm::Collective& group) {
      return start_stage(*codes, step, stage, group);
    };
    return pipelines_->run(2, stages, device);
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

  at::Tensor residual() const override {
    return residual_.all(codes_->residual, codes_->layout.chunks * codes_->layout.numel);
  }
  void load_residual(const at::Tensor& flat) override { residual_.load(codes_->residual, flat); }
  int64_t residual_bytes() const override { return residual_.bytes(codes_->residual); }

 private:
  const CodedSpec& spec() const { return codes_->codes.spec(); }
  int64_t shelf_bytes() const {
    return codes_->shelf() * static_cast<int64_t>(c10::elementSize(at::kFloat));
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
  ShardResidual residual_;
};

}  // namespace

std::unique_ptr<Regions> make_regions(const RegionLayout& layout, const at::Tensor& like,
                                      const CodedSpec* coded, const Routes& routes) {
  FS_CHECK(routes.shards, "sharded buckets need a process group for their regions");
  if (!coded) return std::make_unique<PlainRegions>(layout, like.options(), routes);
  if (coded->node_ranks == 1) {
    return std::make_unique<CodedRegions>(layout, *coded, like.device(), routes);
  }
  FS_CHECK(routes.pipelines, "hierarchical buckets need process groups for their pipelines");
  return std::make_unique<NodeRegions>(layout, *coded, like.device(), routes);
}

}  // namespace fastsync::engine
