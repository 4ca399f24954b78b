#include "coder.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "../check.h"
#include "../ops/lossy_ops.h"
#include "../ops/ops.h"

namespace fastsync::engine {
namespace {

class BlockCoder final : public Coder {
 public:
  explicit BlockCoder(const ops::CodePlan& plan) : plan_(plan) {}

  void encode(const std::vector<ops::Item>& items, const at::Tensor& residual,
              const at::Tensor& payload, const ops::Encoding& how) override {
    ops::encode(items, residual, payload, plan_, how);
  }
  void reduce(const at::Tensor& received, const at::Tensor& result, const at::Tensor& residual,
              int64_t first, uint64_t seed) override {
    ops::reduce(received, result, residual, plan_, first, seed);
  }
  void decode(const std::vector<ops::Item>& items, const at::Tensor& payload,
              int32_t sources) override {
    ops::decode(items, payload, plan_, sources, 0, plan_.numel);
  }
  bool works_on_parts() const override { return true; }
  void decode_part(const std::vector<ops::Item>& items, const at::Tensor& payload, int32_t sources,
                   int64_t begin, int64_t end) override {
    ops::decode(items, payload, plan_, sources, begin, end);
  }

 private:
  ops::CodePlan plan_;
};

// The residuals that error feedback adds to a bucket in which gradients may be absent. If no rank
// has a gradient, its average is not delivered, so the residual of an absent one stays.
class Feedback {
 public:
  // `residual` is flat, fp32, or undefined.
  Feedback(const std::vector<ops::Item>& items, at::Tensor residual)
      : residual_(std::move(residual)), working_(residual_) {
    if (!residual_.defined()) return;
    for (const ops::Item& item : items) {
      if (!item.tensor.defined()) absent_.push_back(item.layout);
    }
    if (absent_.empty()) return;
    const at::NoGradGuard no_grad;
    working_ = ops::copy_of(residual_);
    for (const auto* slot : absent_) working_.narrow(0, slot->offset, slot->numel).zero_();
  }
  // The residual to code with: zero for absent gradients.
  const at::Tensor& working() const { return working_; }
  // Writes working() back, together with the residuals of absent gradients.
  void commit() const {
    if (absent_.empty()) return;
    const at::NoGradGuard no_grad;
    for (const auto* slot : absent_) {
      working_.narrow(0, slot->offset, slot->numel)
          .add_(residual_.narrow(0, slot->offset, slot->numel));
    }
    residual_.copy_(working_);
  }

 private:
  at::Tensor residual_;
  at::Tensor working_;
  std::vector<const ops::SlotLayout*> absent_;
};

// Zeroes what lies between items: a codec may decode zeros to something else, and would be given
// that again.
void clear_gaps(const std::vector<ops::Item>& items, const at::Tensor& flat) {
  std::vector<std::pair<int64_t, int64_t>> taken;
  for (const ops::Item& item : items) taken.emplace_back(item.layout->offset, item.layout->numel);
  std::sort(taken.begin(), taken.end());
  taken.emplace_back(flat.numel(), 0);
  int64_t end = 0;
  for (const auto& [offset, numel] : taken) {
    if (offset > end) flat.narrow(0, end, offset - end).zero_();
    end = offset + numel;
  }
}

class FlatCoder final : public Coder {
 public:
  FlatCoder(std::shared_ptr<Codec> codec, const ops::CodePlan& plan, int64_t coded_bytes)
      : codec_(std::move(codec)), plan_(plan), coded_bytes_(coded_bytes) {}

  void encode(const std::vector<ops::Item>& items, const at::Tensor& residual,
              const at::Tensor& payload, const ops::Encoding& how) override {
    const at::NoGradGuard no_grad;
    const at::Tensor flat = buffer(payload.device());
    ops::pack(items, flat, how.scale);
    const Feedback feedback(items, residual);
    const at::Tensor& kept = feedback.working();
    if (kept.defined()) flat.add_(kept);
    clear_gaps(items, flat);
    for (int64_t i = 0; i < chunks(); ++i) {
      encode_chunk(chunk(flat, i), kept.defined() ? chunk(kept, i) : at::Tensor(),
                   coded(payload, i * how.sources + how.source), /*add=*/false);
    }
    feedback.commit();
  }

  void reduce(const at::Tensor& received, const at::Tensor& result, const at::Tensor& residual,
              int64_t /*first*/, uint64_t /*seed*/) override {
    const at::NoGradGuard no_grad;
    const at::Tensor sum = ops::make_flat(plan_.layout.chunk_numel, at::kFloat, result.device());
    add_decoded(received, 0, received.numel() / plan_.layout.chunk_bytes, sum);
    encode_chunk(sum, residual, coded(result, 0), /*add=*/true);
  }

  void decode(const std::vector<ops::Item>& items, const at::Tensor& payload,
              int32_t sources) override {
    const at::NoGradGuard no_grad;
    const at::Tensor flat = buffer(payload.device());
    flat.zero_();
    for (int64_t i = 0; i < chunks(); ++i)
      add_decoded(payload, i * sources, sources, chunk(flat, i));
    ops::unpack(items, flat, 1.0, false);
  }

 private:
  int64_t chunks() const { return plan_.numel / plan_.layout.chunk_numel; }
  at::Tensor chunk(const at::Tensor& flat, int64_t index) const {
    return flat.narrow(0, index * plan_.layout.chunk_numel, plan_.layout.chunk_numel);
  }
  at::Tensor coded(const at::Tensor& payload, int64_t index) const {
    return payload.narrow(0, index * plan_.layout.chunk_bytes, coded_bytes_);
  }
  at::Tensor buffer(at::Device device) {
    if (!flat_.defined()) flat_ = ops::make_flat(plan_.numel, at::kFloat, device);
    return flat_;
  }

  // Error feedback for a codec without its own. Values that are not finite are not kept: they must
  // not affect a later step.
  void encode_chunk(const at::Tensor& values, const at::Tensor& residual, const at::Tensor& payload,
                    bool add) {
    if (!residual.defined()) {
      codec_->encode(values, payload);
      return;
    }
    const at::Tensor wanted = ops::copy_of(values);
    codec_->encode(values, payload);
    at::Tensor lost = ops::make_scratch(wanted.sizes(), at::kFloat, wanted.device());
    codec_->decode(payload, lost);
    lost = wanted - lost;
    const at::Tensor kept = add ? residual + lost : lost;
    residual.copy_(at::where(at::isfinite(lost), kept, residual));
  }

  void add_decoded(const at::Tensor& payload, int64_t first, int64_t count, const at::Tensor& sum) {
    const at::Tensor part = ops::make_scratch(sum.sizes(), at::kFloat, sum.device());
    for (int64_t i = first; i < first + count; ++i) {
      codec_->decode(coded(payload, i), part);
      sum.add_(part);
    }
  }

  std::shared_ptr<Codec> codec_;
  ops::CodePlan plan_;
  int64_t coded_bytes_;
  at::Tensor flat_;
};

// Sparsification: of a bucket's elements those of largest magnitude travel, with their positions.
//
//   | positions, int32 [k] | values, fp32 [k] |
//
// The whole bucket is one chunk, and every rank sums what all ranks sent: the sum of N sparse
// vectors has up to N k elements, so coding it again would lose most of it. Stich et al.,
// "Sparsified SGD with memory", 2018; Lin et al., "Deep gradient compression", 2018.
class TopKCoder final : public Coder {
 public:
  TopKCoder(const ops::CodePlan& plan, int64_t kept) : plan_(plan), kept_(kept) {
    FS_ASSERT(plan.numel == plan.layout.chunk_numel, "top-k takes a bucket as one chunk");
    FS_ASSERT(8 * kept <= plan.layout.chunk_bytes, "no room for ", kept, " elements");
  }

  void encode(const std::vector<ops::Item>& items, const at::Tensor& residual,
              const at::Tensor& payload, const ops::Encoding& how) override {
    const at::NoGradGuard no_grad;
    const at::Tensor flat = buffer(payload.device());
    ops::pack(items, flat, how.scale);
    const Feedback feedback(items, residual);
    if (residual.defined()) flat.add_(feedback.working());
    const Terms terms = terms_of(payload, how.source);
    ops::select_largest(flat, terms.positions);
    terms.values.copy_(at::index_select(flat, 0, terms.positions));
    if (!residual.defined()) return;
    flat.index_add_(0, terms.positions, terms.values, -1);
    ops::keep_finite(flat, feedback.working());
    feedback.commit();
  }

  void reduce(const at::Tensor& /*received*/, const at::Tensor& /*result*/,
              const at::Tensor& /*residual*/, int64_t /*first*/, uint64_t /*seed*/) override {
    FS_ASSERT(false, "sparse sums are not coded again");
  }

  // One rank after the other, each with distinct positions: every rank gets the same bits.
  void decode(const std::vector<ops::Item>& items, const at::Tensor& payload,
              int32_t sources) override {
    const at::NoGradGuard no_grad;
    const at::Tensor flat = buffer(payload.device());
    flat.zero_();
    for (int32_t source = 0; source < sources; ++source) {
      const Terms terms = terms_of(payload, source);
      flat.index_add_(0, terms.positions, terms.values);
    }
    ops::unpack(items, flat, 1.0, false);
  }

 private:
  struct Terms {
    at::Tensor positions;
    at::Tensor values;
  };

  Terms terms_of(const at::Tensor& payload, int64_t source) const {
    const at::Tensor chunk =
        payload.narrow(0, source * plan_.layout.chunk_bytes, plan_.layout.chunk_bytes);
    return {chunk.narrow(0, 0, 4 * kept_).view(at::kInt),
            chunk.narrow(0, 4 * kept_, 4 * kept_).view(at::kFloat)};
  }

  at::Tensor buffer(at::Device device) {
    if (!flat_.defined()) flat_ = ops::make_flat(plan_.numel, at::kFloat, device);
    return flat_;
  }

  ops::CodePlan plan_;
  int64_t kept_;
  at::Tensor flat_;  // padding between slots stays zero
};

}  // namespace

void Coder::decode_part(const std::vector<ops::Item>& /*items*/, const at::Tensor& /*payload*/,
                        int32_t /*sources*/, int64_t /*begin*/, int64_t /*end*/) {
  FS_ASSERT(false, "this coder decodes whole buckets");
}

std::shared_ptr<Coder> make_block_coder(const ops::CodePlan& plan) {
  return std::make_shared<BlockCoder>(plan);
}

std::shared_ptr<Coder> make_flat_coder(std::shared_ptr<Codec> codec, const ops::CodePlan& plan,
                                       int64_t coded_bytes) {
  return std::make_shared<FlatCoder>(std::move(codec), plan, coded_bytes);
}

std::shared_ptr<Coder> make_topk_coder(const ops::CodePlan& plan, int64_t kept) {
  return std::make_shared<TopKCoder>(plan, kept);
}

}  // namespace fastsync::engine
