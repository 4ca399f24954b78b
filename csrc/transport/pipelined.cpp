// Transport of buckets that travel as codes, through a pipeline of collectives.
//
// [Note: repeatable steps]
// After a death the survivors may average a step again (reducer/survival.h), each from its
// gradients and its error-feedback residual of before the step. Both stay until the averages are
// delivered, after the vote that ends the step:
//
//   * Gradients are read where autograd has put them. Averages are written there in deliver()
//     alone, not as they arrive.
//   * Coding changes the residual: coding of gradients and, in the two-shot form, of sums. It is
//     copied before the first coding. deliver() keeps the new residual; abandon() goes back to the
//     copy. Abandoned pipelines may still sum, and keep the buffers that they write to.
#include <ATen/core/grad_mode.h>

#include <utility>

#include "transports.h"

namespace fastsync::engine {
namespace {

class Pipelined final : public Transport {
 public:
  Pipelined(std::unique_ptr<Coding> coding, Slots& slots,
            std::shared_ptr<comm::Pipelines> pipelines)
      : coding_(std::move(coding)), slots_(slots), pipelines_(std::move(pipelines)) {}

  void take(size_t index, const Packing& how) override {
    Slot& slot = slots_[index];
    const auto bytes =
        slot.layout.numel * static_cast<int64_t>(c10::elementSize(slot.param->dtype()));
    if (bytes < kEarlyBytes || !slot.grad().is_cpu() || !coding_->works_on_parts()) return;
    check_gradient(slot, slot.grad());
    begin_step(how);
    coding_->take({{slot.grad(), &slot.layout}}, {how.scale, how.step});
    slot.early = true;
  }

  bool takes_once() const override { return true; }

  void pack(const Packing& how) override {
    begin_step(how);
    if (how.missed && has_residual()) keep_residuals();
    std::vector<float> flags;
    for (const Slot& slot : slots_) flags.push_back(used_flag(slot));
    flags.push_back(how.vote ? 1.0F : 0.0F);
    coding_->pack(gradient_items(slots_), flags, {how.scale, how.step, how.infinities});
  }

  std::unique_ptr<comm::InFlight> launch() override {
    return coding_->launch(*pipelines_, delivery());
  }

  void deliver(const std::vector<bool>& used) override {
    coding_->unpack(delivery_items(slots_, used, delivered_));
    if (!kept_.empty()) put_back_residuals(used);
    repeatable_ = false;
  }

  void abandon(bool in_flight) override {
    delivered_.clear();
    kept_.clear();
    const bool undelivered = std::exchange(repeatable_, false);
    if (in_flight || undelivered) coding_->abandon();
    if (undelivered && before_.defined()) coding_->load_residual(before_);
  }

  Shadow shadow(uint64_t step) override {
    std::vector<ops::Item> nothing;
    for (const Slot& slot : slots_) nothing.push_back({at::Tensor(), &slot.layout, 0.0F});
    coding_->pack(nothing, std::vector<float>(slots_.size() + 1, 0.0F), {1.0, step});
    return Shadow{coding_->launch(*pipelines_, {}), [this] { return vote(); }};
  }

  bool has_flags() const override { return coding_->has_flags(); }
  at::Tensor flags() const override { return coding_->flags(); }
  at::Tensor vote() const override {
    return has_flags() ? coding_->flag(static_cast<int64_t>(slots_.size())) : at::Tensor();
  }

  int64_t bytes() const override { return coding_->bytes(); }
  int64_t sent_bytes() const override { return coding_->sent_bytes(*pipelines_); }
  int64_t between_nodes_bytes() const override { return coding_->between_nodes_bytes(); }
  int64_t residual_bytes() const override {
    const size_t copied = before_.defined() ? before_.nbytes() : 0;
    return coding_->residual_bytes() + static_cast<int64_t>(copied);
  }

  void read(Residuals& residuals) const override {
    if (!has_residual()) return;
    const at::Tensor flat = coding_->residual();
    for (const Slot& slot : slots_) {
      residuals.at(slot.index) = ops::view_of(flat, slot.layout, at::kFloat);
    }
  }

  void load(const Residuals& residuals) override {
    if (!has_residual()) return;
    const at::NoGradGuard no_grad;
    const at::Tensor flat = coding_->residual();
    for (const Slot& slot : slots_) {
      const at::Tensor mine = ops::view_of(flat, slot.layout, at::kFloat);
      const at::Tensor& loaded = residuals.at(slot.index);
      if (loaded.defined()) {
        mine.copy_(loaded);
      } else {
        mine.zero_();
      }
    }
    coding_->load_residual(flat);
  }

 private:
  bool has_residual() const { return coding_->residual_bytes() > 0; }

  // Before the first code of a step. See [Note: repeatable steps].
  void begin_step(const Packing& how) {
    if (!how.repeatable || std::exchange(repeatable_, true)) return;
    if (!has_residual()) return;
    const at::NoGradGuard no_grad;
    if (before_.defined()) {
      before_.copy_(coding_->residual());
    } else {
      before_ = ops::copy_of(coding_->residual());
    }
  }

  // The average of a parameter that no rank used is not delivered, so it must not change the
  // residual. Only this rank knows the residual of before.
  void keep_residuals() {
    const at::Tensor flat = coding_->residual();
    kept_.assign(slots_.size(), at::Tensor());
    for (size_t i = 0; i < slots_.size(); ++i) {
      const Slot& slot = slots_[i];
      if (!slot.param->used) kept_[i] = ops::copy_of(ops::view_of(flat, slot.layout, at::kFloat));
    }
  }

  void put_back_residuals(const std::vector<bool>& used) {
    const at::NoGradGuard no_grad;
    const at::Tensor flat = coding_->residual();
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (used[i] || !kept_[i].defined()) continue;
      ops::view_of(flat, slots_[i].layout, at::kFloat).copy_(kept_[i]);
    }
    coding_->load_residual(flat);
  }

  // Returns the gradients whose averages may be written as they arrive. A parameter that this rank
  // used is certain to get one.
  Delivery delivery() {
    Delivery delivery;
    if (repeatable_ || !coding_->works_on_parts()) return delivery;
    delivered_.assign(slots_.size(), nullptr);
    for (size_t i = 0; i < slots_.size(); ++i) {
      const Slot& slot = slots_[i];
      const at::Tensor& grad = slot.grad();
      if (!slot.param->used || !grad.defined() || grad.scalar_type() != slot.param->dtype() ||
          !ops::in_slot_order(grad, slot.layout)) {
        continue;
      }
      delivered_[i] = grad.unsafeGetTensorImpl();
      delivery.tensors.push_back(grad);
      delivery.layouts.push_back(slot.layout);
    }
    return delivery;
  }

  std::unique_ptr<Coding> coding_;
  Slots& slots_;
  std::shared_ptr<comm::Pipelines> pipelines_;
  bool repeatable_ = false;             // of the running step
  at::Tensor before_;                   // the residual before it, or before an earlier one
  std::vector<at::Tensor> kept_;        // residuals of unused parameters, before the step
  std::vector<const void*> delivered_;  // gradients whose averages are written on arrival, by slot
};

}  // namespace

std::unique_ptr<Transport> make_pipelined(std::unique_ptr<Coding> coding, Slots& slots,
                                          std::shared_ptr<comm::Pipelines> pipelines) {
  return std::make_unique<Pipelined>(std::move(coding), slots, std::move(pipelines));
}

}  // namespace fastsync::engine
