#include "reducer/autograd_hooks.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "check.h"
#include "ops/buffers.h"

namespace fastsync::engine {
namespace {

using torch::autograd::variable_list;
using torch::autograd::utils::LambdaPostHook;

// Compiled autograd asks each hook how to trace it.
void refuse_to_compile(const torch::dynamo::autograd::CompiledNodeArgs& /*args*/) {
  FS_CHECK(false,
           "FastDDP does not work with compiled autograd: its hooks send buckets while autograd "
           "runs. Turn torch._dynamo.config.compiled_autograd off; torch.compile of the module "
           "itself works, and overlaps");
}

class PreHook final : public torch::autograd::FunctionPreHook {
 public:
  using Fn = std::function<void(const variable_list& grads)>;
  explicit PreHook(Fn fn) : fn_(std::move(fn)) {}

  variable_list operator()(const variable_list& grads) override {
    fn_(grads);
    return grads;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    refuse_to_compile(args);
  }

 private:
  Fn fn_;
};

using Accumulator = decltype(torch::autograd::impl::grad_accumulator(at::Tensor()));

// The node that accumulates gradients of another dtype than the tensor's own. Nodes are made for
// the dtype that they find.
Accumulator accumulator_of(const at::Tensor& tensor, at::ScalarType dtype) {
  const at::Tensor data = tensor.variable_data();
  const auto one = ops::make_zeros({}, dtype, tensor.device());
  tensor.set_data(one.expand(tensor.sizes()));
  auto node = torch::autograd::impl::grad_accumulator(tensor);
  tensor.set_data(data);
  return node;
}

// Versions of torch differ in the type of the weak pointer.
template <typename Weak>
void make_own(void (*set)(const torch::autograd::Variable&, Weak), const at::Tensor& tensor,
              const Accumulator& node) {
  set(tensor, Weak(node));
}

// The actions for the end of one backward. Autograd owns this object, and frees it when the
// backward fails.
class Endings {
 public:
  static std::shared_ptr<Endings> of_running_backward() {
    static std::mutex mutex;
    static std::map<int, std::weak_ptr<Endings>> running;
    const std::lock_guard<std::mutex> lock(mutex);
    for (auto entry = running.begin(); entry != running.end();) {
      entry = entry->second.expired() ? running.erase(entry) : std::next(entry);
    }
    std::weak_ptr<Endings>& mine = running[running_backward()];
    auto endings = mine.lock();
    if (endings) return endings;
    endings = std::make_shared<Endings>();
    mine = endings;
    torch::autograd::Engine::get_default_engine().queue_callback([endings] { endings->run(); });
    return endings;
  }

  // Gradients arrive on a thread per device.
  void add(Turn turn, std::function<void()> fn) {
    const std::lock_guard<std::mutex> lock(mutex_);
    todo_.emplace(std::make_pair(turn.ending, turn.number), std::move(fn));
  }

 private:
  void run() {
    for (auto fn = next(); fn; fn = next()) fn();
  }

  std::function<void()> next() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (todo_.empty()) return nullptr;
    return std::move(todo_.extract(todo_.begin()).mapped());
  }

  std::mutex mutex_;
  std::multimap<std::pair<Ending, int64_t>, std::function<void()>> todo_;
};

}  // namespace

GradientHooks::GradientHooks(std::vector<at::Tensor> params, Ready ready,
                             std::optional<at::ScalarType> compute)
    : params_(std::move(params)),
      ready_(std::move(ready)),
      compute_(compute),
      detach_(params_.size()),
      adopt_(params_.size()) {}

void GradientHooks::attach(size_t param) {
  const at::Tensor& tensor = params_[param];
  if (detach_[param] || !tensor.requires_grad()) return;
  const bool converted = compute_ && tensor.is_floating_point();
  auto node = converted ? accumulator_of(tensor, *compute_)
                        : torch::autograd::impl::grad_accumulator(tensor);
  auto hook = [ready = ready_, param](const variable_list& outputs, const variable_list& grads) {
    ready(param, !grads.empty() && grads.front().defined());
    return outputs;
  };
  const auto key =
      node->add_post_hook(std::make_unique<LambdaPostHook>(std::move(hook), refuse_to_compile));
  // Keeps the node alive: autograd itself holds it only weakly, and a new one would lack the hook.
  detach_[param] = [node, key] { node->del_post_hook(key); };
  if (!converted) return;
  adopt_[param] = [tensor, node] {
    make_own(torch::autograd::impl::set_grad_accumulator, tensor, node);
  };
}

void GradientHooks::adopt() {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (adopt_[i] && params_[i].requires_grad()) adopt_[i]();
  }
}

void GradientHooks::update() {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].requires_grad()) {
      attach(i);
    } else if (detach_[i]) {
      std::exchange(detach_[i], nullptr)();
      adopt_[i] = nullptr;
    }
  }
}

void GradientHooks::detach() {
  for (auto& detach : detach_) {
    if (detach) std::exchange(detach, nullptr)();
  }
  std::fill(adopt_.begin(), adopt_.end(), nullptr);
}

bool GradientHooks::accumulating() const {
  const auto* const expected = torch::autograd::get_current_graph_task_exec_info();
  if (expected == nullptr || expected->empty()) return true;
  return std::any_of(params_.begin(), params_.end(), [&](const at::Tensor& param) {
    if (!param.requires_grad()) return false;
    const auto node = torch::autograd::impl::try_get_grad_accumulator(param);
    const auto found = node ? expected->find(node.get()) : expected->end();
    return found != expected->end() && found->second.needed_;
  });
}

uint64_t next_node() { return at::sequence_number::peek(); }

bool on_backward(const at::Tensor& output, uint64_t first_node, std::function<void()> fn) {
  if (!output.defined() || !output.grad_fn()) return false;
  const auto hook = [fn = std::move(fn)](const variable_list& /*grads*/) { fn(); };
  // An operation in place on a view replaces its node, and leaves the base's where it is.
  const auto base = output.is_view() ? output._base().grad_fn() : nullptr;
  if (base && base->sequence_nr() >= first_node) {
    base->add_pre_hook(std::make_unique<PreHook>(hook));
  }
  output.grad_fn()->add_pre_hook(std::make_unique<PreHook>(hook));
  return true;
}

std::shared_ptr<void> before_accumulation(const at::Tensor& tensor, BeforeAccumulation fn) {
  auto node = torch::autograd::impl::grad_accumulator(tensor);
  auto hook = [fn = std::move(fn)](const variable_list& grads) {
    const at::Tensor& grad = grads.at(0);
    fn(grad, grad.defined() && torch::autograd::impl::is_tensor_stealable(grad));
  };
  node->add_pre_hook(std::make_unique<PreHook>(std::move(hook)));
  return std::make_shared<decltype(node)>(std::move(node));
}

int running_backward() { return torch::autograd::get_current_graph_task_id(); }

void at_end_of_backward(Turn turn, std::function<void()> fn) {
  Endings::of_running_backward()->add(turn, std::move(fn));
}

}  // namespace fastsync::engine
