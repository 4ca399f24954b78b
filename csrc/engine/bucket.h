// One bucket: a flat buffer, the parameters whose gradients share it, and the states it passes through in a step.
//
//   kFilling ──all gradients ready──▶ kReady ──pack()──▶ kPacked ──launch()──▶ kInFlight
//       ▲                                                                          │ receive()
//       └───────────────────────────────finish()───────────────────────────── kReceived
//
// [Note: gradients live in the bucket]
// Where the wire dtype is the gradient's own (`BucketSpec::views`), `param.grad` becomes a view of the flat buffer when it
// is packed: the tensor that autograd produced is freed and nothing is copied back. The storage is reused in the next
// step only while nobody else can see it: every reference to it must be the flat tensor itself or a gradient that still
// sits in its own slot. A user who kept `p.grad` of an earlier step therefore keeps its values; the bucket takes a new
// buffer. Otherwise gradients stay where autograd put them, and finish() writes the averages into them.
//
// [Note: used flags]
// Behind the gradients the flat buffer carries one element per slot, 1 where this rank produced a gradient since the last
// synchronisation and 0 where not, and one more element for this rank's vote on a new plan. The sum over ranks tells for
// free whether anyone used a parameter. Only a rank that missed a gradient has to read the flags back. A communication
// hook sees the gradients alone; the reducer then exchanges the flags itself.
//
// [Note: early packing]
// On a CPU a gradient that outgrows the caches is packed when it arrives: it is still in the last of them, and its memory is
// free for the next layer's gradient. On a device one launch for the whole bucket matters more.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../comm/collective.h"
#include "../comm/hook.h"
#include "../ops/ops.h"
#include "../transport/coded.h"
#include "../transport/low_rank.h"

namespace fastsync::engine {

// A model parameter, as the reducer and its buckets see it. Addresses are stable for the reducer's life.
struct Parameter {
  at::Tensor tensor;
  std::string name;
  bool used = false;  // a gradient arrived since the last synchronisation
  int expected_fires =
      1;  // gradient accumulations in one backward; more than 1 is learned (reentrant checkpoints)
  // Mixed precision: what the parameter is stored in, and its gradient in the end; both are of another dtype in backward.
  std::optional<at::ScalarType> stored = std::nullopt;

  at::ScalarType dtype() const { return stored.value_or(tensor.scalar_type()); }
};

struct SlotSpec {
  int64_t param = 0;   // index into the reducer's parameters
  int64_t offset = 0;  // first real element in the flat buffer
};

// What Python's plan decides about a bucket.
struct BucketSpec {
  std::vector<SlotSpec> slots;
  int64_t numel = 0;          // real elements of the flat buffer, padding and flags included
  int64_t flags_offset = -1;  // first of slots.size() + 1 flag elements; -1: no flags
  at::ScalarType wire = at::kFloat;
  bool views = true;    // gradients live in the flat buffer; needs wire == gradient dtype
  bool sparse = false;  // one parameter whose gradient may be a sparse tensor
  // Travels over a Wire instead; no views, no flags in the flat buffer.
  std::optional<CodedSpec> coded;
  std::optional<PowerSpec> low_rank;
};

enum class BucketState { kFilling, kReady, kPacked, kInFlight, kReceived };
const char* to_string(BucketState state);

struct PackOptions {
  double scale = 1.0;  // 1 / divisor, applied before the sum
  bool vote = false;   // this rank asks for a new plan
  uint64_t step = 0;   // see Taking
};

// What coding carries from step to step, fp32, by parameter index; undefined where there is nothing.
struct Carried {
  explicit Carried(size_t params) : residuals(params), factors(params) {}

  std::vector<at::Tensor> residuals;  // what error feedback has kept back of each gradient
  std::vector<at::Tensor> factors;    // what its next code starts with; see Wire::factor
};

// A collective that this rank joins only so that the others do not wait for it.
struct Shadow {
  std::unique_ptr<comm::InFlight> in_flight;
  std::function<at::Tensor()> vote;  // after in_flight->wait(); undefined without flags
};

class Bucket {
 public:
  Bucket(BucketSpec spec, const std::vector<std::unique_ptr<Parameter>>& params);

  size_t size() const { return slots_.size(); }
  const BucketSpec& spec() const { return spec_; }
  BucketState state() const { return state_; }
  at::Device device() const { return slots_.front().param->tensor.device(); }
  int64_t wire_bytes() const;
  int64_t gradient_bytes() const;
  // Bytes that leave this rank in one step, of `ranks`; a ring all-reduce where the backend decides.
  int64_t sent_bytes(int ranks) const;
  int64_t between_nodes_bytes() const { return wire_ ? wire_->between_nodes_bytes() : 0; }
  // "12 parameters, 'layer4.weight' to 'fc.bias', 25.0 MiB"
  std::string describe() const;

  // Sends it over `wire` instead of summing a flat buffer; null: does not.
  void use(std::unique_ptr<Wire> wire) { wire_ = std::move(wire); }
  bool is_coded() const { return wire_ != nullptr; }
  // Whether this rank had no gradient for some slot in this step.
  bool missed() const { return missed_; }

  // A gradient has arrived, computed on `stream`. Returns whether it completed the bucket. More arrivals than expected are
  // remembered, and waited for from the next step on.
  bool mark_ready(size_t slot, std::optional<c10::Stream> stream);
  // Packs a gradient that has arrived ahead of its bucket, where that pays. See [Note: early packing].
  void pack_early(size_t slot, const PackOptions& options);
  // Whether another gradient for this slot would come too late.
  bool is_settled(size_t slot) const { return slots_[slot].early && (spec_.views || wire_); }
  int fires(size_t slot) const { return slots_[slot].fires; }
  bool complete() const { return pending_ == 0; }
  // End of backward: takes what is there for every slot that got nothing.
  void close();

  // kReady -> kPacked. The flat buffer holds the scaled gradients.
  void pack(const PackOptions& options);
  // kPacked -> kInFlight. The hook's form has the bucket's place among `count` buckets.
  void launch(comm::Collective& collective);
  void launch(comm::Hook& hook, size_t index, size_t count);
  void launch(comm::Chains& chains);
  // In flight: calls `fn` when the collective has completed; see comm::InFlight::on_done.
  void on_done(std::function<void()> fn) { in_flight_->on_done(std::move(fn)); }
  // kInFlight -> kReceived. Waits for the result.
  void receive();
  // kReceived -> kFilling. Makes every used parameter's gradient the average. `used_anywhere`, by parameter index, stands
  // in for the flags; empty: the flags of the buffer tell.
  void finish(const std::vector<bool>& used_anywhere);
  // Any state -> kFilling, dropping what a failed backward left.
  void abandon();

  // Takes part in a step of other ranks with zeros and no used parameter (uneven inputs).
  Shadow shadow(comm::Collective& collective) const;
  Shadow shadow(comm::Hook& hook, size_t index, size_t count) const;
  Shadow shadow(comm::Chains& chains, uint64_t step);

  // The summed vote of the last finished step, still on the device; undefined without flags.
  at::Tensor vote() const;
  // Writes how many ranks used each of its parameters in the last finished step; nothing without flags.
  void count_uses(std::vector<int64_t>& counts) const;
  bool has_residual() const { return residual_bytes() > 0; }
  int64_t residual_bytes() const { return wire_ ? wire_->residual_bytes() : 0; }
  bool has_factor(size_t slot) const { return factor(slot).defined(); }
  // Adds what it carries of its parameters: perhaps views of its memory.
  void read_carried(Carried& carried) const;
  // The other way. Where there is nothing, it begins anew.
  void load_carried(const Carried& carried);

 private:
  struct Slot {
    Parameter* param = nullptr;
    ops::SlotLayout layout;
    int fires = 0;
    bool in_place = false;            // the gradient already lives in this slot
    bool early = false;               // and was packed when it arrived
    const void* delivered = nullptr;  // the gradient that its average is written into on arrival
    at::Tensor kept;  // copy of an unused in-place gradient, put back if no rank used it
    std::optional<c10::Stream> stream;
  };

  void move_to(BucketState from, BucketState to);
  void check_gradient(const Slot& slot, const at::Tensor& grad) const;
  void wait_for_producers() const;
  void pack_dense(const PackOptions& options);
  void pack_sparse(const PackOptions& options);
  void pack_coded(const PackOptions& options);
  bool has_flags() const;
  Delivery delivery();
  void find_in_place();
  void ensure_flat();
  void keep_unused();
  std::vector<ops::Item> gradient_items(bool all_in_place);
  void append_flags(std::vector<ops::Item>& items, bool vote);
  void install_view(Slot& slot);
  void lend_to_current_stream() const;
  at::Tensor flags_on_host() const;
  std::vector<bool> globally_used(const std::vector<bool>& used_anywhere) const;
  comm::HookBucket hook_view(const at::Tensor& flat, size_t index, size_t count) const;
  at::Tensor vote_in(const at::Tensor& flat) const;
  at::Tensor factor(size_t slot) const;
  void load_residuals(const std::vector<at::Tensor>& residuals);
  void finish_sparse();
  void finish_views(const std::vector<bool>& used);
  void finish_copies(const std::vector<bool>& used);

  BucketSpec spec_;
  std::vector<Slot> slots_;
  std::vector<ops::SlotLayout> flag_layouts_;  // one per slot, the vote, all slots at once
  ops::SlotLayout gradients_layout_;           // everything in front of the flags
  ops::SlotLayout
      hook_layout_;  // the same in elements of the parameters' dtype, which may be complex
  BucketState state_ = BucketState::kFilling;
  size_t pending_ = 0;
  bool missed_ = false;        // this rank had no gradient for some slot
  bool flat_is_ours_ = false;  // checked in this step
  at::Tensor flat_;
  std::optional<c10::Stream> home_;  // the stream that flat_ was allocated on; none on a CPU
  std::unique_ptr<comm::InFlight> in_flight_;
  std::unique_ptr<Wire> wire_;
};

}  // namespace fastsync::engine
