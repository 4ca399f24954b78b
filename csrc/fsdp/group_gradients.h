// Detects gradients of whole members that arrive although no backward of their module was
// announced.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <memory>

#include "reducer/autograd_hooks.h"

namespace fastsync::engine {

// Keeps the autograd node alive whose hook watches the gradients of a tensor.
struct WatchedGradient {
  std::shared_ptr<void> node;
};

// Autograd passes the outputs of a module before it reaches the parameters, unless the script hides
// these outputs. A gradient that arrives unannounced would stay on this rank, so `unannounced` is
// called before it is accumulated.
class UnitGradients {
 public:
  explicit UnitGradients(std::function<void()> unannounced)
      : state_(std::make_shared<State>(std::move(unannounced))) {}

  // Watches the gradients of `whole` as long as the returned object lives.
  WatchedGradient watch(const at::Tensor& whole) const {
    return {before_accumulation(whole, [state = state_](const at::Tensor& /*grad*/, bool /*ours*/) {
      if (!state->announced) state->unannounced();
    })};
  }
  // Whether the running backward has been announced.
  void announce(bool whether) { state_->announced = whether; }

 private:
  struct State {
    explicit State(std::function<void()> fn) : unannounced(std::move(fn)) {}
    std::atomic<bool> announced{false};
    std::function<void()> unannounced;
  };
  std::shared_ptr<State> state_;
};

}  // namespace fastsync::engine
