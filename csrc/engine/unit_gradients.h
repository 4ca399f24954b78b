// Gradients of whole members that arrive where no backward of their module has been announced.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <functional>
#include <memory>

#include "autograd_hooks.h"

namespace fastsync::engine {

// What keeps autograd from forgetting that the gradients of a tensor are watched.
struct WatchedGradient {
  std::shared_ptr<void> node;
};

// Autograd passes the outputs of a module before it comes to the parameters, unless the script
// hides these outputs. A gradient that arrives unannounced would stay on this rank, so
// `unannounced` is called before it is accumulated.
class UnitGradients {
 public:
  explicit UnitGradients(std::function<void()> unannounced)
      : state_(std::make_shared<State>(std::move(unannounced))) {}

  // Returns what has to live as long as the gradients of `whole` are to be noticed.
  WatchedGradient watch(const at::Tensor& whole) const {
    return {before_accumulation(whole, [state = state_] {
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
