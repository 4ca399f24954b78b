#include "reducer/survival.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "ops/buffers.h"
#include "ops/ops.h"

namespace fastsync::engine {

void OwnGradients::keep(size_t param, bool in_bucket) {
  const at::Tensor& grad = params_[param]->tensor.grad();
  if (!grad.defined()) return;
  const at::NoGradGuard no_grad;
  grads_[param] = in_bucket ? ops::copy_of(grad) : grad;
}

void OwnGradients::note_used() {
  used_.clear();
  for (const auto& param : params_) used_.push_back(param->used);
}

void OwnGradients::restore_gradients() const {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!grads_[i].defined()) continue;
    // Allocated on the backward's stream, read on this one. Its contents are ready: at the end of
    // a backward, the current stream waits for all streams of the backward.
    ops::record_here(grads_[i]);
    params_[i]->tensor.mutable_grad() = grads_[i];
  }
}

void OwnGradients::restore_used() const {
  for (size_t i = 0; i < used_.size(); ++i) params_[i]->used = used_[i];
}

void OwnGradients::drop() { std::fill(grads_.begin(), grads_.end(), at::Tensor()); }

void Vote::start(comm::Collective& group) {
  if (!sum_.defined()) sum_ = group.make_flat(1, at::kFloat, at::kCPU);
  const auto layout = ops::SlotLayout::run(0, 1);
  ops::pack(std::vector<ops::Item>{{at::Tensor(), &layout, 1.0F}}, sum_, 1.0);
  in_flight_ = group.all_reduce(sum_);
}

void Vote::drop() {
  in_flight_.reset();
  sum_ = at::Tensor();  // collectives may still write to it
}

}  // namespace fastsync::engine
