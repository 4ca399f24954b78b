#include "coder.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
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
    const ops::Feedback feedback(items, residual);
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

}  // namespace fastsync::engine
