#include "reducer/flags.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ops/ops.h"

namespace fastsync::engine {

void FlagExchange::start(const std::vector<bool>& used, at::Device device) {
  missed_ = std::find(used.begin(), used.end(), false) != used.end();
  prepare(used.size(), device);
  // Values of the kernel's arguments, not a copy from the host, which would have it wait.
  std::vector<ops::Item> items;
  if (missed_) {
    for (size_t i = 0; i < used.size(); ++i) {
      items.push_back({at::Tensor(), &layouts_[i], used[i] ? 1.0F : 0.0F});
    }
  } else {
    items.push_back({at::Tensor(), &layouts_.back(), 1.0F});
  }
  ops::pack(items, sum_, 1.0);
  in_flight_ = group_->all_reduce(sum_);
}

void FlagExchange::prepare(size_t count, at::Device device) {
  const auto flags = static_cast<int64_t>(count);
  if (layouts_.size() != count + 1) {
    layouts_.clear();
    for (int64_t i = 0; i < flags; ++i) layouts_.push_back(ops::SlotLayout::run(i, 1));
    layouts_.push_back(ops::SlotLayout::run(0, flags));
  }
  if (!sum_.defined() || sum_.numel() != flags || sum_.device() != device) {
    sum_ = group_->make_flat(flags, at::kFloat, device);
  }
}

std::vector<bool> FlagExchange::wait(const std::function<void(comm::InFlight&)>& arrives) {
  arrives(*in_flight_);
  in_flight_.reset();
  if (!missed_) return {};
  const std::vector<int64_t> ranks = counts();
  return std::vector<bool>(ranks.begin(), ranks.end());
}

// An abandoned collective still writes to its buffer, so the buffer is not reused.
void FlagExchange::abandon() {
  if (std::exchange(in_flight_, nullptr)) sum_ = at::Tensor();
}

std::vector<int64_t> FlagExchange::counts() const {
  if (!sum_.defined()) return {};
  const at::Tensor host = sum_.is_cpu() ? sum_ : sum_.to(at::kCPU);  // no operation on a CPU
  const float* values = host.const_data_ptr<float>();
  std::vector<int64_t> counts;
  for (int64_t i = 0; i < host.numel(); ++i) counts.push_back(std::lround(values[i]));
  return counts;
}

}  // namespace fastsync::engine
