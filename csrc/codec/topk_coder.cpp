#include "topk_coder.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/index_select.h>

#include "../check.h"
#include "../ops/lossy_ops.h"
#include "../ops/ops.h"

namespace fastsync::engine {
namespace {

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
    const ops::Feedback feedback(items, residual);
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

std::shared_ptr<Coder> make_topk_coder(const ops::CodePlan& plan, int64_t kept) {
  return std::make_shared<TopKCoder>(plan, kept);
}

}  // namespace fastsync::engine
