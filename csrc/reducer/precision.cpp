#include "reducer/precision.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "reducer/autograd_hooks.h"

namespace fastsync::engine {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

constexpr int64_t kAlignment = 16;  // elements

}  // namespace

// Held by the final callback of a backward. An error that ends the backward early destroys the
// callback instead of calling it.
class Precision::Restoration {
 public:
  explicit Restoration(std::function<void()> restore) : restore_(std::move(restore)) {}
  ~Restoration() { now(); }
  Restoration(const Restoration&) = delete;
  Restoration& operator=(const Restoration&) = delete;

  void now() {
    if (const auto restore = std::exchange(restore_, nullptr)) restore();
  }

 private:
  std::function<void()> restore_;
};

Precision::Precision(std::vector<at::Tensor> params, at::ScalarType compute)
    : params_(std::move(params)), compute_(compute), low_(params_.size()) {}

bool Precision::converts(const at::Tensor& param) const {
  return param.is_floating_point() && param.scalar_type() != compute_;
}

std::optional<at::ScalarType> Precision::stored_dtype(const at::Tensor& param) const {
  return converts(param) ? std::optional(param.scalar_type()) : std::nullopt;
}

bool Precision::laid_out() const {
  const auto fits = [&](size_t i) {
    const at::Tensor& param = params_[i];
    if (converts(param) != low_[i].defined()) return false;
    return !low_[i].defined() ||
           (param.device() == low_[i].device() && param.sizes() == low_[i].sizes());
  };
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!fits(i)) return false;
  }
  return true;
}

Precision::Group& Precision::group_of(at::Device device) {
  for (Group& group : groups_) {
    if (params_[group.members.front()].device() == device) return group;
  }
  return groups_.emplace_back();
}

void Precision::lay_out() {
  groups_.clear();
  low_.assign(params_.size(), at::Tensor());
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!converts(params_[i])) continue;
    Group& group = group_of(params_[i].device());
    int64_t end = 0;
    if (!group.layouts.empty()) end = group.layouts.back().offset + group.layouts.back().numel;
    const int64_t offset = (end + kAlignment - 1) / kAlignment * kAlignment;
    group.members.push_back(i);
    group.layouts.push_back(ops::SlotLayout::of(params_[i], offset));
  }
  for (Group& group : groups_) {
    const ops::SlotLayout& last = group.layouts.back();
    const at::Device device = params_[group.members.front()].device();
    group.flat = ops::make_flat(std::max<int64_t>(last.offset + last.numel, 1), compute_, device);
    for (size_t i = 0; i < group.members.size(); ++i) {
      low_[group.members[i]] = ops::view_of(group.flat, group.layouts[i], compute_);
    }
  }
}

void Precision::begin_forward() {
  const Lock lock(mutex_);
  restore();
  if (!laid_out()) lay_out();
  for (const Group& group : groups_) {
    std::vector<ops::Item> items;
    items.reserve(group.members.size());
    for (size_t i = 0; i < group.members.size(); ++i) {
      items.push_back({params_[group.members[i]], &group.layouts[i], 0.0F});
    }
    ops::pack(items, group.flat, 1.0);
  }
  ++forwards_;
  lower();
}

void Precision::begin_backward() {
  const Lock lock(mutex_);
  lower();
}

void Precision::lower() {
  if (!stored_.empty()) return;
  stored_.resize(params_.size());
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!low_[i].defined()) continue;
    stored_[i] = params_[i].variable_data();
    params_[i].set_data(low_[i]);
  }
  if (on_exchange_) on_exchange_();
}

void Precision::restore() {
  const Lock lock(mutex_);
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> stored = std::exchange(stored_, {});
  for (size_t i = 0; i < stored.size(); ++i) {
    if (!stored[i].defined()) continue;
    params_[i].set_data(stored[i]);
    at::Tensor& grad = params_[i].mutable_grad();
    if (grad.defined() && grad.scalar_type() != stored[i].scalar_type()) {
      grad = grad.to(stored[i].scalar_type());
    }
  }
}

void Precision::restore_at_end() {
  const Lock lock(mutex_);
  if (!restoration_.expired()) return;
  const std::weak_ptr<Precision> weak = weak_from_this();
  const auto restoration = std::make_shared<Restoration>([weak, forward = forwards_] {
    const auto self = weak.lock();
    if (!self) return;
    const Lock inner(self->mutex_);
    self->restoration_.reset();
    if (self->forwards_ == forward) self->restore();
  });
  restoration_ = restoration;
  at_end_of_backward({Ending::kRestore}, [restoration] { restoration->now(); });
}

}  // namespace fastsync::engine
