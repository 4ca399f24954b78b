// Gradients coded to bytes, summed in fp32, and coded again: the two-shot form; or summed by every
// rank: the gather form.
//
//   two-shot  encode ─▶ all-to-all of chunks ─▶ decode, sum, encode ─▶ all-gather of sums ─▶ decode
//   gather    encode ─▶ all-gather of everything ─▶ decode and sum
//
// The two-shot form moves the bytes of a ring all-reduce, 2 (N-1)/N of the coded bucket from and to
// each of N ranks, and rounds twice: each gradient, and each average. ZeRO++ (Wang et al., 2023)
// and Bagua's ByteGrad do the same. The gather form moves (N-1) coded buckets and rounds once:
// better at two ranks, where the bytes are equal, and for sparse codes, whose sums are longer than
// their terms. All ranks decode the same bytes in the same order, so they hold the same bits.
//
// The bucket travels in `pieces`: while one is summed, the next is on the wire.
//
// [Note: one residual]
// Error feedback (Seide et al., 2014; Karimireddy et al., 2019) adds what a code lost to the next
// step's gradient. What the second rounding loses belongs to the average, and so to any rank's
// share of it: the rank that sums a chunk adds it to its own residual. The sum of the residuals
// over ranks is then exactly what the averages applied so far still lack.
//
// [Note: flags of a coded bucket]
// Used flags and the vote travel after the codes of each chunk as floats, and are summed exactly.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "coding.h"

namespace fastsync::engine {
namespace {

// Starts a stage of one piece; the last one delivers its averages.
std::unique_ptr<comm::InFlight> start_stage(const CodeBuffers& buffers, const Delivery& delivery,
                                            int64_t index, size_t stage, comm::Collective& group) {
  const at::NoGradGuard no_grad;
  const CodePiece& piece = buffers.pieces[static_cast<size_t>(index)];
  if (stage == 0) {
    return buffers.spec.gather ? group.all_gather(piece.received, piece.sent)
                               : group.all_to_all(piece.received, piece.sent);
  }
  if (stage == 1 && !buffers.spec.gather) {
    buffers.sum(index);
    return group.all_gather(piece.received, piece.sum);
  }
  if (delivery.tensors.empty()) return nullptr;
  const int64_t numel = buffers.piece_numel();
  buffers.coder->decode_part(delivery.items(), buffers.received, buffers.sources(), index * numel,
                             (index + 1) * numel);
  return nullptr;
}

class Coded final : public Coding {
 public:
  Coded(const CodedSpec& spec, int rank, int ranks, at::Device device)
      : buffers_(std::make_shared<CodeBuffers>(spec, rank, ranks, device)) {}

  void take(const std::vector<ops::Item>& items, Taking how) override {
    buffers_->encode(items, encoding(how));
  }

  // Codes only the first piece if it pays to send it early; launch() codes the remainder.
  void pack(const std::vector<ops::Item>& items, const std::vector<float>& flags,
            Taking how) override {
    ops::Encoding encoding = this->encoding(how);
    if (goes_by_pieces(items)) {
      remainder_ = {items, encoding};
      encoding.end = buffers_->piece_numel();
    }
    if (!items.empty()) buffers_->encode(items, encoding);
    const bool changed = how.infinities.defined() || flags != buffers_->sent_flags;
    if (buffers_->flags_coder && changed) send_flags(flags, how.infinities);
  }

  bool works_on_parts() const override { return buffers_->coder->works_on_parts(); }

  std::unique_ptr<comm::InFlight> launch(comm::Pipelines& pipelines, Delivery delivery) override {
    const auto shared = std::make_shared<const Delivery>(std::move(delivery));
    std::vector<std::unique_ptr<comm::InFlight>> pieces;
    const Remainder remainder = std::exchange(remainder_, {});
    for (int64_t i = 0; i < buffers_->spec.pieces; ++i) {
      if (i > 0 && !remainder.items.empty())
        buffers_->encode(remainder.items, part_of(remainder.encoding, i));
      const auto stages = [buffers = buffers_, shared, i](size_t stage, comm::Collective& group) {
        return start_stage(*buffers, *shared, i, stage, group);
      };
      pieces.push_back(pipelines.run(buffers_->spec.gather ? 1 : 2, stages, buffers_->device));
    }
    return comm::all_of(std::move(pieces));
  }

  void unpack(const std::vector<ops::Item>& items) override {
    if (items.empty()) return;
    buffers_->coder->decode(items, buffers_->received, sources());
  }

  bool has_flags() const override { return buffers_->spec.flags_per_chunk > 0; }

  at::Tensor flags() const override { return all_flags().sum(1).reshape({-1}); }

  at::Tensor flag(int64_t index) const override {
    const int64_t each = buffers_->spec.flags_per_chunk;
    if (buffers_->device.is_cpu()) return flag_on_host(index / each, index % each);
    return all_flags().select(0, index / each).select(1, index % each).sum().reshape({1});
  }

  void abandon() override {
    buffers_ = buffers_->renewed();
    remainder_ = {};
  }

  int64_t bytes() const override { return buffers_->chunks() * buffers_->spec.chunk_bytes; }

  int64_t sent_bytes(const comm::Pipelines& /*pipelines*/) const override {
    const int64_t others = buffers_->ranks - 1;
    if (buffers_->spec.gather) return others * bytes();
    return 2 * others * bytes() / buffers_->ranks;
  }

  at::Tensor residual() const override { return buffers_->residual; }

  void load_residual(const at::Tensor& flat) override {
    if (!flat.is_same(buffers_->residual)) buffers_->residual.copy_(flat);
  }

  int64_t residual_bytes() const override {
    return buffers_->residual.defined() ? static_cast<int64_t>(buffers_->residual.nbytes()) : 0;
  }

 private:
  // The gradients of which only the first piece is coded.
  struct Remainder {
    std::vector<ops::Item> items;
    ops::Encoding encoding;
  };

  int32_t sources() const { return buffers_->sources(); }

  ops::Encoding encoding(Taking how) {
    buffers_->seed = buffers_->spec.seed_of(how.step);
    ops::Encoding encoding = buffers_->encoding();
    encoding.scale = how.scale;
    encoding.seed = buffers_->seed;
    return encoding;
  }

  ops::Encoding part_of(ops::Encoding whole, int64_t piece) const {
    whole.begin = piece * buffers_->piece_numel();
    whole.end = whole.begin + buffers_->piece_numel();
    return whole;
  }

  // A gradient whose memory is in another order would be copied for every piece.
  bool goes_by_pieces(const std::vector<ops::Item>& items) const {
    return buffers_->spec.pieces > 1 && buffers_->device.is_cpu() && works_on_parts() &&
           std::all_of(items.begin(), items.end(), [](const ops::Item& item) {
             return !item.tensor.defined() || ops::in_slot_order(item.tensor, *item.layout);
           });
  }

  void send_flags(const std::vector<float>& flags, const at::Tensor& infinities) {
    const at::NoGradGuard no_grad;
    const int64_t numel = buffers_->flags_plan.numel;
    const at::Tensor values = flags_on(buffers_->device, flags, numel, infinities);
    const ops::SlotLayout layout = ops::SlotLayout::run(0, numel);
    buffers_->flags_coder->encode({{values, &layout}}, at::Tensor(), buffers_->sent,
                                  buffers_->encoding());
    buffers_->sent_flags = infinities.defined() ? std::vector<float>() : flags;
  }

  // [chunks, sources, flags_per_chunk], on the wire's own memory.
  at::Tensor all_flags() const {
    const CodedSpec& spec = buffers_->spec;
    return buffers_->received.view(at::kFloat)
        .view({buffers_->chunks(), sources(), spec.chunk_bytes / 4})
        .narrow(2, spec.flags_offset / 4, spec.flags_per_chunk);
  }

  // Asked for in every step: no dispatched operation.
  at::Tensor flag_on_host(int64_t chunk, int64_t place) const {
    const CodedSpec& spec = buffers_->spec;
    const auto* flags = buffers_->received.const_data_ptr<uint8_t>() + spec.flags_offset +
                        chunk * sources() * spec.chunk_bytes;
    float sum = 0;
    for (int32_t r = 0; r < sources(); ++r) {
      sum += reinterpret_cast<const float*>(flags + r * spec.chunk_bytes)[place];
    }
    if (!flag_.defined()) flag_ = ops::make_flat(1, at::kFloat, at::kCPU);
    flag_.mutable_data_ptr<float>()[0] = sum;
    return flag_;
  }

  std::shared_ptr<CodeBuffers> buffers_;
  Remainder remainder_;
  mutable at::Tensor flag_;
};

}  // namespace

std::unique_ptr<Coding> make_coded(const CodedSpec& spec, int rank, int ranks, at::Device device) {
  return std::make_unique<Coded>(spec, rank, ranks, device);
}

}  // namespace fastsync::engine
