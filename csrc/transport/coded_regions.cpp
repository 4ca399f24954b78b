#include <ATen/core/grad_mode.h>

#include <utility>

#include "../ops/buffers.h"
#include "../ops/ops.h"
#include "code_buffers.h"
#include "coding.h"
#include "region_codes.h"

namespace fastsync::engine {
namespace {

class CodedRegions final : public Regions {
 public:
  CodedRegions(const RegionLayout& layout, const CodedSpec& spec, at::Device device,
               std::shared_ptr<comm::Collective> group, std::shared_ptr<ops::BufferPool> pool)
      : codes_(spec, layout.chunks, device),
        numel_(layout.numel),
        group_(std::move(group)),
        pool_(std::move(pool)) {
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

}  // namespace

std::unique_ptr<Regions> make_coded_regions(const RegionLayout& layout, const CodedSpec& spec,
                                            at::Device device,
                                            std::shared_ptr<comm::Collective> group,
                                            std::shared_ptr<ops::BufferPool> pool) {
  return std::make_unique<CodedRegions>(layout, spec, device, std::move(group), std::move(pool));
}

}  // namespace fastsync::engine
