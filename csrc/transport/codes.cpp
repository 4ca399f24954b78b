#include "codes.h"

#include <ATen/core/grad_mode.h>

#include "../ops/ops.h"

namespace fastsync::engine {

std::shared_ptr<Coder> make_coder(const CodedSpec& spec, const ops::CodePlan& plan) {
  if (spec.codec) return make_flat_coder(spec.codec, plan, spec.coded_bytes);
  if (spec.kept > 0) return make_topk_coder(plan, spec.kept);
  return make_block_coder(plan);
}

CodeBuffers::CodeBuffers(const CodedSpec& coded, int my_rank, int all_ranks, at::Device on)
    : spec(coded), rank(my_rank), ranks(all_ranks), device(on) {
  plan = spec.values_plan(chunks());
  flags_plan = spec.flags_plan(chunks());
  coder = make_coder(spec, plan);
  if (spec.flags_per_chunk > 0) flags_coder = make_block_coder(flags_plan);
  if (spec.error_feedback) residual = ops::make_flat(plan.numel, at::kFloat, device);
  allocate();
}

std::shared_ptr<CodeBuffers> CodeBuffers::renewed() const {
  auto fresh = std::make_shared<CodeBuffers>(*this);
  fresh->allocate();
  if (residual.defined()) fresh->residual = ops::copy_of(residual);
  return fresh;
}

void CodeBuffers::allocate() {
  const at::NoGradGuard no_grad;
  received = ops::make_flat(spec.pieces * ranks * spec.chunk_bytes, at::kByte, device);
  sent = spec.gather ? received : ops::make_flat(received.numel(), at::kByte, device);
  if (!spec.gather) sums = ops::make_flat(spec.pieces * spec.chunk_bytes, at::kByte, device);
  sent_flags.clear();
  pieces.clear();
  for (int64_t i = 0; i < spec.pieces; ++i) pieces.push_back(piece(i));
}

CodePiece CodeBuffers::piece(int64_t index) const {
  const auto part = [&](const at::Tensor& buffer, int64_t chunks_each) {
    const int64_t bytes = chunks_each * spec.chunk_bytes;
    return buffer.narrow(0, index * bytes, bytes);
  };
  const at::Tensor everyones = part(received, ranks);
  if (!spec.gather) return CodePiece{part(sent, ranks), everyones, part(sums, 1)};
  return CodePiece{everyones.narrow(0, rank * spec.chunk_bytes, spec.chunk_bytes), everyones, {}};
}

ops::Encoding CodeBuffers::encoding() const {
  ops::Encoding how;
  how.sources = sources();
  how.source = spec.gather ? rank : 0;
  return how;
}

void CodeBuffers::sum(int64_t index) const {
  const CodePiece& piece = pieces[static_cast<size_t>(index)];
  const int64_t mine = (index * ranks + rank) * spec.chunk_numel;
  const at::Tensor lost =
      residual.defined() ? residual.narrow(0, mine, spec.chunk_numel) : at::Tensor();
  coder->reduce(piece.received, piece.sum, lost, mine, kernels::mixed(seed));
  if (flags_coder) flags_coder->reduce(piece.received, piece.sum, at::Tensor(), 0, 0);
}

RegionCodes::RegionCodes(const CodedSpec& spec, int64_t owners, at::Device device)
    : spec_(spec),
      owners_(owners),
      device_(device),
      writer_(make_coder(spec, spec.values_plan(owners))),
      reader_(make_coder(spec, spec.values_plan(1))) {}

void RegionCodes::encode(const std::vector<ops::Item>& items, const at::Tensor& residual,
                         const at::Tensor& payload, const ops::Encoding& how) const {
  if (!items.empty()) writer_->encode(items, residual, payload, how);
}

void RegionCodes::encode_flags(const at::Tensor& flags, int64_t stride,
                               const at::Tensor& payload) const {
  const int64_t each = spec_.flags_per_chunk;
  ops::ItemList items;
  for (int64_t r = 0; r < owners_; ++r) {
    items.add_run(ops::run_of(flags, r * stride, each), r * each, each);
  }
  ops::encode(items.items(), at::Tensor(), payload, spec_.flags_plan(owners_), {});
}

void RegionCodes::sum(const at::Tensor& payload, const std::vector<ops::Item>& items,
                      bool accumulate) const {
  if (items.empty()) return;
  const auto sources = static_cast<int32_t>(owners_);
  if (!accumulate) return reader_->decode(items, payload, sources);
  const at::Tensor sums = ops::make_scratch({spec_.chunk_numel}, at::kFloat, device_);
  std::vector<ops::Item> terms = items;
  for (ops::Item& term : terms) term.tensor = ops::view_of(sums, *term.layout, at::kFloat);
  reader_->decode(terms, payload, sources);
  ops::unpack(items, sums, 1.0, /*accumulate=*/true);
}

void RegionCodes::sum_flags(const at::Tensor& payload, const at::Tensor& flags) const {
  const ops::CodePlan plan = spec_.flags_plan(1);
  const auto all = ops::SlotLayout::run(0, flags.numel());
  ops::decode({{flags, &all}}, payload, plan, static_cast<int32_t>(owners_), 0, plan.numel);
}

at::Tensor ShardResidual::all(const at::Tensor& own, int64_t numel) const {
  if (!own.defined()) return {};
  const at::NoGradGuard no_grad;
  const at::Tensor flat =
      others_.defined() ? ops::copy_of(others_) : ops::make_flat(numel, at::kFloat, own.device());
  const at::Tensor mine = part_(flat);
  mine.add_(own.view(mine.sizes()));
  return flat;
}

void ShardResidual::load(const at::Tensor& own, const at::Tensor& flat) {
  const at::NoGradGuard no_grad;
  const at::Tensor mine = part_(flat);
  own.view(mine.sizes()).copy_(mine);
  mine.zero_();
  others_ = flat.any().item<bool>() ? flat : at::Tensor();
}

int64_t ShardResidual::bytes(const at::Tensor& own) const {
  if (!own.defined()) return 0;
  return static_cast<int64_t>(own.nbytes() + (others_.defined() ? others_.nbytes() : 0));
}

}  // namespace fastsync::engine
