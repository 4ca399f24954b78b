// The memory of a flat buffer, the gradients that live in it, and its other references.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "slots.h"

namespace fastsync::engine {

class GradientBuffer {
 public:
  // The slots must live longer.
  explicit GradientBuffer(const Slots& slots) : slots_(slots), parts_(slots.size()) {}

  // Takes `memory`, one-dimensional, without other references. Gradients of the former keep that.
  void renew(at::Tensor memory);
  void drop();

  // The whole buffer; undefined without memory.
  const at::Tensor& flat() const { return flat_; }
  // The tensor that the slot's gradient becomes.
  at::Tensor view(size_t slot);
  // Whether the slot's gradient is that tensor.
  bool in_place(size_t slot) const;
  // Whether it was, until its storage, or the buffer's, was given other memory, as share_memory_()
  // does.
  bool moved_out(size_t slot) const;
  // Whether there are references to the memory besides `references` to the flat buffer and
  // gradients in their own slots.
  bool held_by_others(size_t references) const;

 private:
  bool has_parts() const;
  bool in_memory(size_t slot) const;

  const Slots& slots_;
  at::Tensor memory_;  // on CPUs only this object sees its storage
  at::Tensor flat_;
  std::vector<c10::Storage> parts_;  // by slot; null until there was a view
};

}  // namespace fastsync::engine
