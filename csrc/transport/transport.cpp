#include "transport.h"

#include <limits>

#include "../check.h"

namespace fastsync::engine {

float used_flag(const Slot& slot) {
  if (!slot.param->used) return 0.0F;
  return slot.finite ? 1.0F : std::numeric_limits<float>::infinity();
}

void check_gradient(const Slot& slot, const at::Tensor& grad) {
  const at::Tensor& param = slot.param->tensor;
  FS_CHECK(!grad.unsafeGetTensorImpl()->is_python_dispatch(), "the gradient of parameter '",
           slot.param->name,
           "' is of a class of its own, without memory here: perhaps another FastDDP(zero=...) has "
           "spread it over the ranks. Set it to None before the backward of this wrapper");
  FS_CHECK(grad.layout() == at::kStrided, "parameter '", slot.param->name,
           "' received a gradient with layout ", grad.layout(),
           ", but its module does not announce sparse gradients; only nn.Embedding and "
           "nn.EmbeddingBag with sparse=True are reduced as sparse tensors");
  const bool right_dtype =
      grad.scalar_type() == param.scalar_type() || grad.scalar_type() == slot.param->dtype();
  FS_CHECK(right_dtype && grad.device() == param.device() && grad.sizes() == param.sizes(),
           "the gradient of parameter '", slot.param->name, "' is ", grad.scalar_type(), " ",
           grad.sizes(), " on ", grad.device(), ", but the parameter is ", param.scalar_type(), " ",
           param.sizes(), " on ", param.device(),
           "; was the model moved or converted after it was wrapped? Wrap it afterwards");
}

std::vector<ops::Item> gradient_items(const Slots& slots) {
  std::vector<ops::Item> items;
  items.reserve(slots.size() * 2 + 2);  // room for flags
  for (const Slot& slot : slots) {
    if (slot.early) continue;
    const at::Tensor& grad = slot.grad();
    if (!grad.defined()) {
      items.push_back({at::Tensor(), &slot.layout, 0.0F});
      continue;
    }
    check_gradient(slot, grad);
    items.push_back({grad, &slot.layout});
  }
  return items;
}

std::vector<ops::Item> delivery_items(const Slots& slots, const std::vector<bool>& used,
                                      const std::vector<const void*>& done) {
  std::vector<ops::Item> items;
  items.reserve(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    if (!used[i]) continue;
    const Slot& slot = slots[i];
    at::Tensor& grad = slot.param->tensor.mutable_grad();
    if (grad.defined() && !done.empty() && done[i] == grad.unsafeGetTensorImpl()) continue;
    if (!grad.defined() || grad.scalar_type() != slot.param->dtype()) {
      grad = ops::make_strided(slot.layout.sizes, slot.layout.strides, slot.param->dtype(),
                               slot.param->tensor.device());
    }
    items.push_back({grad, &slot.layout});
  }
  return items;
}

}  // namespace fastsync::engine
