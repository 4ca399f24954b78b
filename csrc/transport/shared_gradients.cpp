#include "shared_gradients.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "../ops/buffers.h"
#include "../ops/norms.h"

namespace fastsync::engine {
namespace {

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

bool is_plain(const at::Tensor& grad) {
  const bool known = grad.layout() == at::kStrided || grad.layout() == at::kSparse;
  return grad.is_cpu() && known && !grad.key_set().has(c10::DispatchKey::Python);
}

struct Member {
  const ShardedGradients* unit = nullptr;
  size_t index = 0;
};

std::unordered_map<const at::TensorImpl*, Member> members_by_proxy(const ShardedUnits& units) {
  std::unordered_map<const at::TensorImpl*, Member> members;
  for (const auto& unit : units) {
    for (size_t i = 0; i < unit->proxies.size(); ++i) {
      members[unit->proxies[i].unsafeGetTensorImpl()] = {unit.get(), i};
    }
  }
  return members;
}

// The sum of squares of plain gradients: of those of a transport together, of the others one by
// one.
double sum_squares(const std::vector<at::Tensor>& gradients,
                   const std::vector<HeldGradients>& held) {
  std::unordered_set<const at::TensorImpl*> left;
  for (const at::Tensor& gradient : gradients) left.insert(gradient.unsafeGetTensorImpl());
  double total = 0.0;
  for (const HeldGradients& bucket : held) {
    const auto asked = [&](const at::Tensor& gradient) {
      return left.count(gradient.unsafeGetTensorImpl()) > 0;
    };
    if (!std::all_of(bucket.gradients.begin(), bucket.gradients.end(), asked)) continue;
    for (const at::Tensor& gradient : bucket.gradients) left.erase(gradient.unsafeGetTensorImpl());
    total += bucket.transport->square_sum();
  }
  std::vector<at::Tensor> alone;
  for (const at::Tensor& gradient : gradients) {
    if (left.count(gradient.unsafeGetTensorImpl()) > 0) alone.push_back(gradient);
  }
  for (const double sum : ops::square_sums(alone)) total += sum;
  return total;
}

bool is_wide(const at::Tensor& tensor) {
  return c10::toRealValueType(tensor.scalar_type()) == at::kDouble;
}

}  // namespace

void SquareSums::forget(size_t member) {
  if (member < sums_.size()) sums_[member].reset();
}

void SquareSums::take(const at::Tensor& shard, uint32_t before, const std::vector<size_t>& members,
                      const std::vector<double>& sums) {
  if (before != version_) sums_.clear();
  version_ = version_of(shard);
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i] >= sums_.size()) sums_.resize(members[i] + 1);
    sums_[members[i]] = sums[i];
  }
}

std::optional<double> SquareSums::of(const at::Tensor& shard, size_t member) const {
  if (member >= sums_.size() || version_of(shard) != version_) return {};
  return sums_[member];
}

void ShardedGradients::announce(size_t member, const at::Tensor& grad) {
  announced.at(member).reset();
  if (grad.defined()) announced[member].emplace(grad.getIntrusivePtr());
}

void ShardedGradients::add(size_t member, const at::Tensor& grad) {
  const at::NoGradGuard no_grad;
  const auto expected = std::exchange(announced.at(member), std::nullopt);
  at::Tensor& mine = pending.at(member);
  if (mine.defined()) {
    mine.add_(grad);
    return;
  }
  const at::Tensor& param = params[member];
  const bool fits = grad.layout() == at::kStrided && grad.strides() == param.strides();
  const bool ours = expected && expected->lock().get() == grad.unsafeGetTensorImpl();
  if (ours && fits) {
    mine = grad.detach();
  } else {
    const auto strides = param.strides();
    mine = ops::make_strided(param.sizes(), strides, param.scalar_type(), param.device());
    mine.copy_(grad);
  }
}

std::optional<GradientSquares> known_squares(const std::vector<at::Tensor>& params,
                                             const ShardedUnits& units,
                                             const std::vector<HeldGradients>& held) {
  const auto members = members_by_proxy(units);
  GradientSquares result;
  size_t proxies = 0;
  for (const at::Tensor& param : params) {
    const at::Tensor& grad = param.grad();
    if (!grad.defined()) continue;
    result.wide = result.wide || is_wide(grad);
    const auto found = members.find(grad.unsafeGetTensorImpl());
    if (found == members.end()) {
      if (!is_plain(grad)) return {};
      result.tensors.push_back(grad);
      continue;
    }
    const auto [unit, index] = found->second;
    const std::optional<double> sum = unit->squares.of(unit->shard, index);
    if (!sum || unit->pending[index].defined()) return {};
    result.owned += *sum;
    ++proxies;
  }
  result.common = sum_squares(result.tensors, held);
  result.spread = proxies > 0;
  result.all_spread = proxies == members.size();
  return result;
}

}  // namespace fastsync::engine
