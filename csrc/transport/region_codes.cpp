#include "region_codes.h"

#include "../ops/buffers.h"
#include "../ops/ops.h"
#include "code_buffers.h"

namespace fastsync::engine {

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
  std::vector<ops::SlotLayout> layouts;
  for (int64_t r = 0; r < owners_; ++r) layouts.push_back(ops::SlotLayout::run(r * each, each));
  std::vector<ops::Item> items;
  for (int64_t r = 0; r < owners_; ++r) {
    const auto mine = ops::SlotLayout::run(r * stride, each);
    items.push_back({ops::view_of(flags, mine, at::kFloat), &layouts[static_cast<size_t>(r)]});
  }
  ops::encode(items, at::Tensor(), payload, spec_.flags_plan(owners_), {});
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

}  // namespace fastsync::engine
