#include "fsdp/group_codes.h"

#include <utility>

#include "ops/ops.h"
#include "transport/coding.h"

namespace fastsync::engine {

UnitCodes::UnitCodes(const CodedSpec& spec, std::shared_ptr<comm::Collective> ranks,
                     at::Device device, int tag)
    : codes_(spec, ranks->size(), device), ranks_(std::move(ranks)), device_(device), tag_(tag) {}

at::Tensor UnitCodes::chunk(const at::Tensor& chunks, int rank) const {
  return ops::run_of(chunks, rank * spec().chunk_bytes, spec().chunk_bytes);
}

// One message to each rank: `same` for all, or its own chunk.
std::unique_ptr<comm::InFlight> UnitCodes::exchange(const at::Tensor& received,
                                                    const at::Tensor& sent, bool same) const {
  std::vector<comm::Message> coming;
  std::vector<comm::Message> going;
  for (int r = 0; r < ranks_->size(); ++r) {
    if (r == ranks_->rank()) continue;
    coming.push_back({r, chunk(received, r)});
    going.push_back({r, same ? sent : chunk(sent, r)});
  }
  return ranks_->exchange(std::move(coming), std::move(going), tag_);
}

std::unique_ptr<comm::InFlight> UnitCodes::gather(const at::Tensor& shard,
                                                  const at::Tensor& chunks) const {
  const at::Tensor mine = chunk(chunks, ranks_->rank());
  const auto all = ops::SlotLayout::run(0, spec().chunk_numel);
  make_coder(spec(), spec().values_plan(1))->encode({{shard, &all}}, at::Tensor(), mine, {});
  if (ranks_->has_messages(device_)) return exchange(chunks, mine, /*same=*/true);
  return ranks_->all_gather(chunks, mine);
}

void UnitCodes::decode(const std::vector<ops::Item>& items, const at::Tensor& chunks) const {
  if (items.empty()) return;
  make_coder(spec(), spec().values_plan(ranks_->size()))->decode(items, chunks, 1);
}

void UnitCodes::encode(const std::vector<ops::Item>& items, const std::vector<float>& used,
                       const at::Tensor& chunks, const ops::Encoding& how) const {
  codes_.encode(items, at::Tensor(), chunks, how);
  codes_.encode_flags(flags_on(device_, used, spec().flags_per_chunk), 0, chunks);
}

std::unique_ptr<comm::InFlight> UnitCodes::scatter(const at::Tensor& received,
                                                   const at::Tensor& sent) const {
  if (!ranks_->has_messages(device_)) return ranks_->all_to_all(received, sent);
  chunk(received, ranks_->rank()).copy_(chunk(sent, ranks_->rank()));
  return exchange(received, sent, /*same=*/false);
}

void UnitCodes::sum(const at::Tensor& received, const std::vector<ops::Item>& items,
                    const at::Tensor& flags) const {
  codes_.sum(received, items, /*accumulate=*/false);
  codes_.sum_flags(received, flags);
}

}  // namespace fastsync::engine
