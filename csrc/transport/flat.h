// Transports that sum one flat buffer of gradients.
//
// [Note: gradients live in the bucket]
// If the buffer has the dtype of the gradients (`FlatSpec::views`), `param.grad` becomes a view of
// the flat buffer when it is packed: the tensor that autograd produced is freed and nothing is
// copied back. The memory is reused in the next step only while no other tensor can see it: every
// reference to it must be the transport's own or a gradient that still sits in its own slot. A user
// who kept `p.grad` of an earlier step therefore keeps its values; the bucket takes a new buffer.
// With another dtype gradients stay where autograd put them, and deliver() writes the averages into
// them.
//
// [Note: a storage for each gradient]
// Code that saves, copies or shares a tensor does so with its whole storage. So on CPUs each view
// has a storage of its own, as large as its slot, whose deleter releases the memory's storage
// (ops::part_of). Three reference counts show what is in use: the buffer and the gradient in its
// slot refer to a part; the transport alone refers to the flat buffer's storage; these alone refer
// to the memory, whose storage is never handed out. Parts are made when a slot first needs one in
// new memory, so a step that reuses its buffer makes none. A storage can be given other memory
// under its tensors, as share_memory_() does, perhaps for another process to watch. Then the
// gradient has moved out: it is packed like any other, and deliver() writes the average to its new
// place, as long as gradient and plan stay. On other devices the views share the buffer's storage.
// Only memory that its allocator handed out as such can be recorded on another stream
// (Tensor.record_stream) or be sent to another process. For a part, CUDA's allocator silently
// ignores the recording, so a gradient that was saved and dropped could be overwritten while a
// stream still reads it.
//
// [Note: used flags]
// After the gradients the flat buffer carries one element per slot, 1 if this rank produced a
// gradient since the last synchronisation and 0 if not, and one more element for this rank's vote
// on a new plan. The sum over ranks shows at no cost whether any rank used a parameter. Only a rank
// that missed a gradient has to read the flags back.
//
// [Note: early packing]
// On a CPU a gradient that outgrows the caches is packed when it arrives: it is still in the last
// of them, and its memory is free for the next layer's gradient. On a device one launch for the
// whole bucket matters more.
//
// [Note: squares of the buffer]
// If a script clips gradients by their norm, the code that adds the buffer up also reports the sum
// of the squares of its elements. That sum is valid until a gradient is written to, which its
// version shows. Torch does not count writes through `.data`, so one element in kProbe is compared
// as well. In doubt the buffer is read, chunk by chunk. That gives the same bits: ranks that clip
// equal gradients must clip them alike.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "transport.h"

namespace fastsync::engine {

// Gradients of at least so many bytes are taken when they arrive: more than fits in a core's own
// cache with other data.
constexpr int64_t kEarlyBytes = 512 << 10;

struct FlatSpec {
  int64_t numel = 0;          // real elements, padding and flags included
  int64_t flags_offset = -1;  // first of slots + 1 flag elements; -1: no flags
  at::ScalarType dtype = at::kFloat;
  bool views = true;  // gradients live in the flat buffer; needs dtype == gradient dtype
};

// The memory of a flat buffer, the gradients that live in it, and its other references.
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

class Flat : public Transport {
 public:
  // The slots must live longer.
  Flat(const FlatSpec& spec, Slots& slots);

  void take(size_t slot, const Packing& how) override;
  bool lives_here(size_t slot) const override { return spec_.views && buffer_.in_place(slot); }
  bool takes_once() const override { return spec_.views; }
  void pack(const Packing& how) override;
  std::unique_ptr<comm::InFlight> launch() override { return start(flat()); }
  void receive(const at::Tensor& result) override;
  void deliver(const std::vector<bool>& used) override;
  void abandon(bool in_flight) override;
  Shadow shadow(uint64_t step) override;

  bool holds_gradients() const override;
  double square_sum() const override;

  bool has_flags() const override { return !flag_layouts_.empty() && flat().defined(); }
  at::Tensor flags() const override;
  at::Tensor vote() const override { return vote_in(flat()); }
  int64_t bytes() const override;

 protected:
  // Sends a buffer of this layout; `flat` need not be that of the step.
  virtual std::unique_ptr<comm::InFlight> start(const at::Tensor& flat) = 0;
  // References of its own to the storage of the step's buffer.
  virtual size_t references() const { return 1; }
  virtual void new_buffer() {}
  // Zeros of the buffer's size, in memory that start() likes.
  virtual at::Tensor make_memory() const;

  const FlatSpec& spec() const { return spec_; }
  // Elements of all gradients, in front of the flags.
  int64_t gradients_numel() const { return gradients_layout_.numel; }
  bool missed() const { return missed_; }
  Slots& slots() const { return slots_; }
  const at::Tensor& flat() const { return buffer_.flat(); }
  at::Device device() const { return slots_.front().param->tensor.device(); }

 private:
  // State of a gradient while it travels.
  struct Place {
    bool in_place = false;  // it lives in its slot already
    at::Tensor kept;        // copy of an unused one in place, put back if no rank used it
  };

  void check_kind(const Slot& slot) const;
  void find_in_place();
  void ensure_flat();
  void keep_unused();
  std::vector<ops::Item> items() const;
  void append_flags(std::vector<ops::Item>& items, const Packing& how) const;
  void install_view(size_t slot);
  at::Tensor vote_in(const at::Tensor& flat) const;
  void deliver_moved_out(const std::vector<bool>& used);
  void deliver_views(const std::vector<bool>& used);

  FlatSpec spec_;
  Slots& slots_;
  std::vector<Place> places_;                  // one per slot
  std::vector<ops::SlotLayout> flag_layouts_;  // one per slot, the vote, all slots at once
  ops::SlotLayout gradients_layout_;           // everything in front of the flags
  bool flat_is_ours_ = false;                  // checked in this step
  bool missed_ = false;
  GradientBuffer buffer_;
};

// Sums the buffer by one all-reduce. See [Note: squares of the buffer].
std::unique_ptr<Flat> make_all_reduce(const FlatSpec& spec, Slots& slots,
                                      std::shared_ptr<comm::Collective> ranks);

}  // namespace fastsync::engine
