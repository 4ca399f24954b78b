#include "code_buffers.h"

#include <ATen/core/grad_mode.h>

#include "../codec/topk_coder.h"
#include "../kernels/random.h"
#include "../ops/buffers.h"

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
  received = ops::make_bytes(spec.pieces * ranks * spec.chunk_bytes, device);
  sent = spec.gather ? received : ops::make_bytes(received.numel(), device);
  if (!spec.gather) sums = ops::make_bytes(spec.pieces * spec.chunk_bytes, device);
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

}  // namespace fastsync::engine
