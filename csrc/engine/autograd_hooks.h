// Our hooks on autograd: when a parameter's gradient has been accumulated, and when a backward
// starts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace fastsync::engine {

// Hooks on the AccumulateGrad nodes of parameters. They run after the accumulation, without the
// GIL, beside any hook of the user. Destroying this removes them.
class GradientHooks {
 public:
  // `ready` is called with the index of the parameter whose gradient has arrived, and whether that
  // is a tensor at all: a function's backward may return none. It must hold no reference to what
  // owns these hooks.
  using Ready = std::function<void(size_t param, bool defined)>;
  // Where `compute` is given, gradients of floating-point parameters arrive in that dtype: see
  // adopt().
  GradientHooks(std::vector<at::Tensor> params, Ready ready, std::optional<at::ScalarType> compute);
  ~GradientHooks() { detach(); }
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  // Hooks a parameter that needs a gradient and has no hook yet.
  void attach(size_t param);
  // Hooks all that need a gradient and unhooks the others: a parameter that was frozen loses its
  // node and gets another when it is thawed.
  void update();
  void detach();
  // To be called whenever the parameters' data has been exchanged for that of dtype `compute`:
  // exchanging it made autograd forget the hooked nodes.
  void adopt();

  // Whether the running backward may accumulate into one of the parameters; autograd.grad() does
  // not.
  bool accumulating() const;

 private:
  std::vector<at::Tensor> params_;
  Ready ready_;
  std::optional<at::ScalarType> compute_;
  std::vector<std::function<void()>> detach_;  // one per parameter; empty without a hook
  std::vector<std::function<void()>> adopt_;   // likewise; empty where the dtype stays
};

// Calls `fn` when a backward reaches the node that produced `output`, before anything in front of
// it. Returns whether there is such a node.
bool on_backward(const at::Tensor& output, std::function<void()> fn);

// Calls `fn` before a backward accumulates into the leaf `tensor`. Returns what keeps autograd from
// forgetting that.
std::shared_ptr<void> before_accumulation(const at::Tensor& tensor, std::function<void()> fn);

// The number that autograd has given the running backward; each has its own, an inner one of
// reentrant checkpointing too.
int running_backward();

// [Note: the end of a backward]
// One backward may go through several wrappers, whose gradients come first in another order on each
// rank. Where each wrapper ended its step when its turn came, one rank would wait for the first
// wrapper's buckets and another for the second's. So all first send what is left, then each waits
// and plans, in the order in which they were made, which is the same on every rank.
enum class Ending { kSend, kWait, kRestore };

// When something is done at the end of a backward: by kind, then in the order of `number`.
struct Turn {
  Ending ending = Ending::kSend;
  int64_t number = 0;
};

// Calls `fn` at the end of the running backward, unless that fails.
void at_end_of_backward(Turn turn, std::function<void()> fn);
// Calls `fn`, which must not throw, where it does fail, before whoever called it hears of it.
void at_failure_of_backward(std::function<void()> fn);

}  // namespace fastsync::engine
