#include "reducer/flags.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "transport/coding.h"

namespace fastsync::engine {

void FlagExchange::start(const std::vector<bool>& used, at::Device device) {
  missed_ = std::find(used.begin(), used.end(), false) != used.end();
  const auto count = static_cast<int64_t>(used.size());
  if (!sum_.defined() || sum_.numel() != count || sum_.device() != device) {
    sum_ = group_->make_flat(count, at::kFloat, device);
  }
  write_flags({used.begin(), used.end()}, sum_);
  in_flight_ = group_->all_reduce(sum_);
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
