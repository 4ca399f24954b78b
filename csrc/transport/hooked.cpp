// Transport of buckets that a communication hook reduces.
//
// The buffer belongs to the hook while the hook runs, so it holds only gradients. The hook gets one
// view of it, and the same view each step: backends that keep their input for a while then keep no
// new memory.
#include <utility>

#include "../check.h"
#include "transports.h"

namespace fastsync::engine {

comm::HookBucket hook_bucket(const Slots& slots, const at::Tensor& buffer, HookPlace place) {
  const int64_t per_element = slots.front().param->tensor.is_complex() ? 2 : 1;
  comm::HookBucket bucket{place.index, place.count, buffer, {}};
  for (const Slot& slot : slots) {
    bucket.slots.push_back({static_cast<size_t>(slot.layout.offset / per_element),
                            static_cast<size_t>(slot.layout.numel / per_element), slot.layout.sizes,
                            slot.param->tensor});
  }
  return bucket;
}

namespace {

class Hooked final : public Flat {
 public:
  Hooked(const FlatSpec& spec, Slots& slots, comm::Hook hook, HookPlace place, int ranks)
      : Flat(spec, slots), hook_(std::move(hook)), place_(place), ranks_(ranks) {
    layout_ = ops::SlotLayout::run(0, spec.numel);
    if (slots.front().param->tensor.is_complex()) layout_.sizes = {layout_.numel / 2};
  }

  bool is_users() const override { return true; }
  // The bytes of a hook that sends the buffer as it is.
  int64_t sent_bytes() const override { return 2 * bytes() * (ranks_ - 1) / ranks_; }

  void receive(const at::Tensor& result) override {
    Flat::receive(result);
    if (!result.defined() || result.const_data_ptr() == flat().const_data_ptr()) return;
    const at::Tensor& like = slots().front().param->tensor;
    FS_CHECK(result.numel() == layout_.sizes[0], "the communication hook returned ", result.numel(),
             " elements for a bucket of ", layout_.sizes[0]);
    const at::Tensor reduced = result.detach().to(like.device(), like.scalar_type()).view({-1});
    ops::pack({{reduced, &layout_}}, flat(), 1.0);
  }

 private:
  std::unique_ptr<comm::InFlight> start(const at::Tensor& flat) override {
    const bool own = flat.is_same(this->flat());
    const at::Tensor view = own && view_.defined() ? view_ : view_of(flat);
    if (own) view_ = view;
    return hook_(hook_bucket(slots(), view, place_));
  }

  at::Tensor view_of(const at::Tensor& flat) const {
    return ops::view_of(flat, layout_, slots().front().param->tensor.scalar_type());
  }

  size_t references() const override { return view_.defined() ? 2 : 1; }
  void new_buffer() override { view_ = at::Tensor(); }

  comm::Hook hook_;
  HookPlace place_;
  int ranks_;
  ops::SlotLayout layout_;  // the buffer in elements of the parameters' dtype, which may be complex
  at::Tensor view_;         // of the step's buffer, for the hook
};

}  // namespace

std::unique_ptr<Flat> make_hooked(const FlatSpec& spec, Slots& slots, comm::Hook hook,
                                  HookPlace place, int ranks) {
  return std::make_unique<Hooked>(spec, slots, std::move(hook), place, ranks);
}

}  // namespace fastsync::engine
