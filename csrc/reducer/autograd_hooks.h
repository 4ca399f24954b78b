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
  // Called with the index of the parameter whose gradient has arrived, and whether that gradient is
  // defined: a function's backward may return none. Must hold no reference to the owner of these
  // hooks.
  using Ready = std::function<void(size_t param, bool defined)>;
  // With `compute`, gradients of floating-point parameters arrive in that dtype: see adopt().
  GradientHooks(std::vector<at::Tensor> params, Ready ready, std::optional<at::ScalarType> compute);
  ~GradientHooks() { detach(); }
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  // Hooks a parameter that needs a gradient and has no hook yet.
  void attach(size_t param);
  // Hooks the parameters that require a gradient and unhooks the others: a frozen parameter loses
  // its node and gets another one when it is unfrozen.
  void update();
  void detach();
  // Gives the parameters their hooked nodes back. Must be called whenever the parameters' data has
  // been replaced by that of dtype `compute`, which makes autograd forget the nodes.
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

// The number that autograd gives the next node of a graph that this thread makes.
uint64_t next_node();

// Calls `fn` when a backward reaches the node that produced `output`, before anything in front of
// it. For a view that happens again at the node of its base, if that is `first_node` or a later
// one. Returns whether there is such a node.
bool on_backward(const at::Tensor& output, uint64_t first_node, std::function<void()> fn);

// A gradient, perhaps undefined, that a backward is about to accumulate. `ours`: nobody else refers
// to it, so that autograd, too, would keep it without a copy.
using BeforeAccumulation = std::function<void(const at::Tensor& grad, bool ours)>;

// Calls `fn` before a backward accumulates into the leaf `tensor`, as long as the returned object
// lives.
std::shared_ptr<void> before_accumulation(const at::Tensor& tensor, BeforeAccumulation fn);

// The number that autograd has given the running backward; each has its own, an inner one of
// reentrant checkpointing too.
int running_backward();

// [Note: the end of a backward]
// One backward may pass through several wrappers, and which wrapper's gradients come first may
// differ between ranks. If each wrapper ended its step in that order, one rank would wait for the
// first wrapper's buckets and another for the second's. So all wrappers first send their remaining
// buckets. Then each waits and plans, in the order in which the wrappers were made, which is the
// same on every rank.
enum class Ending { kSend, kWait, kRestore };

// The place of an action at the end of a backward: by kind, then in the order of `number`.
struct Turn {
  Ending ending = Ending::kSend;
  int64_t number = 0;
};

// Calls `fn` at the end of the running backward, unless the backward fails.
void at_end_of_backward(Turn turn, std::function<void()> fn);

}  // namespace fastsync::engine
