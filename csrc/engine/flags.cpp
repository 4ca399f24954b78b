#include "flags.h"

#include <algorithm>
#include <cmath>

#include "../ops/buffers.h"
#include "../ops/ops.h"

namespace fastsync::engine {

void FlagExchange::start(const std::vector<bool>& used, at::Device device) {
  const auto count = static_cast<int64_t>(used.size());
  missed_ = std::find(used.begin(), used.end(), false) != used.end();
  std::vector<ops::SlotLayout> layouts;
  std::vector<ops::Item> items;
  if (missed_) {
    for (int64_t i = 0; i < count; ++i) layouts.push_back(ops::SlotLayout::run(i, 1));
  } else {
    layouts.push_back(ops::SlotLayout::run(0, count));
  }
  for (size_t i = 0; i < layouts.size(); ++i) {
    items.push_back({at::Tensor(), &layouts[i], !missed_ || used[i] ? 1.0F : 0.0F});
  }
  // Values of the kernel's arguments, not a copy from the host, which would have it wait.
  sum_ = ops::make_flat(count, at::kFloat, device);
  ops::pack(items, sum_, 1.0);
  in_flight_ = group_->all_reduce(sum_);
}

std::vector<bool> FlagExchange::wait() {
  in_flight_->wait();
  in_flight_.reset();
  if (!missed_) return {};
  const std::vector<int64_t> ranks = counts();
  return std::vector<bool>(ranks.begin(), ranks.end());
}

std::vector<int64_t> FlagExchange::counts() const {
  if (!sum_.defined()) return {};
  const at::Tensor host = sum_.to(at::kCPU);
  const float* values = host.const_data_ptr<float>();
  std::vector<int64_t> counts;
  for (int64_t i = 0; i < host.numel(); ++i) counts.push_back(std::lround(values[i]));
  return counts;
}

}  // namespace fastsync::engine
