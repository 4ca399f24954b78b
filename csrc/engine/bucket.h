// One bucket: the gradients that travel together, and the states they pass through in a step.
//
//   kFilling ──all gradients ready──▶ kReady ──pack()──▶ kPacked ──launch()──▶ kInFlight
//       ▲                                                                          │ receive()
//       └───────────────────────────────finish()───────────────────────────── kReceived
//
// The bucket counts what has arrived and knows what is missing; how it gets from gradients to
// averages is its transport's.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../comm/collective.h"
#include "../transport/choose.h"

namespace fastsync::engine {

enum class BucketState { kFilling, kReady, kPacked, kInFlight, kReceived };
const char* to_string(BucketState state);

using Parameters = std::vector<std::unique_ptr<Parameter>>;

// [Note: flags that stay on a device]
// On a device a gradient is looked at for NaN and infinity without the host: what was found is
// added to the used flags before they travel. Their sums stay there, too, until somebody asks which
// averages are not finite: the host then waits once.
struct UnreadFlags {
  std::vector<Parameter*> params;
  std::vector<bool> added;  // to averages that were there before
  at::Tensor sums;          // over ranks, fp32, one per parameter
  at::Tensor own;           // likewise, infinity where this rank gave NaN or infinity
};

class Bucket {
 public:
  // Number `index` of `count`.
  Bucket(const BucketSpec& spec, const Parameters& params, const Routes& routes, size_t index,
         size_t count);

  const Slots& slots() const { return *slots_; }
  const Transport& transport() const { return *transport_; }
  Transport& transport() { return *transport_; }
  BucketState state() const { return state_; }
  at::Device device() const { return slots_->front().param->tensor.device(); }
  int64_t gradient_bytes() const;
  // "12 parameters, 'layer4.weight' to 'fc.bias', 25 MiB"; smaller ones in KiB or bytes
  std::string describe() const;
  // Whether this rank had no gradient for some slot in this step.
  bool missed() const { return missed_; }

  // A gradient has arrived, computed on `stream`. Returns whether it completed the bucket. More
  // arrivals than expected are remembered, and waited for from the next step on.
  bool mark_ready(size_t slot, std::optional<c10::Stream> stream);
  // Offers the transport a gradient that has arrived ahead of its bucket.
  void offer(size_t slot, const Packing& how);
  // Whether another gradient for this slot would come too late.
  bool is_settled(size_t slot) const { return (*slots_)[slot].early && transport_->takes_once(); }
  int fires(size_t slot) const { return (*slots_)[slot].fires; }
  bool complete() const { return pending_ == 0; }
  // End of backward: takes what is there for every slot that got nothing.
  void close();
  // Looks for NaN and infinity in the gradients that have come. pack() does so where it is told to;
  // a rank without others calls it, and note_finite(). `travels`: what is found does.
  void check_finite(bool travels);

  // Whoever reads its gradients on the current stream waits for those that computed them. pack()
  // does.
  void wait_for_producers() const;
  // kReady -> kPacked
  void pack(Packing how);
  // kPacked -> kInFlight
  void launch();
  // In flight: calls `fn` when the collective has completed; see comm::InFlight::on_done.
  void on_done(std::function<void()> fn) { in_flight_->on_done(std::move(fn)); }
  // In flight: whether arrives_within() can wait.
  bool can_be_asked() const { return in_flight_->can_be_asked(); }
  // In flight: whether receive() would not have to wait, after so long.
  bool arrives_within(std::chrono::milliseconds time) { return in_flight_->is_done_within(time); }
  // kInFlight -> kReceived. Waits for the result.
  void receive();
  // kReceived -> kFilling. Makes every used parameter's gradient the average. `used_anywhere`, by
  // parameter index, stands in for the flags; empty: the flags that travelled tell.
  void finish(const std::vector<bool>& used_anywhere);
  // Notes which averages hold NaN or infinity, as the flags tell that `travelled`; where none did,
  // as this rank saw.
  void note_finite(bool travelled);
  // What note_finite() has left on the device since it was last asked; see
  // [Note: flags that stay on a device].
  std::optional<UnreadFlags> take_unread() { return std::exchange(unread_, std::nullopt); }
  // Any state -> kFilling, dropping what a failed backward left.
  void abandon();

  // What travelled with the gradients: how many ranks used each parameter, fp32. Undefined where
  // nothing did.
  at::Tensor sums_of_flags() const;
  // Writes how many ranks used each of its parameters in the last finished step; nothing without
  // flags.
  void count_uses(std::vector<int64_t>& counts) const;

 private:
  void move_to(BucketState from, BucketState to);
  void check(const std::vector<size_t>& slots);
  at::Tensor find_infinities() const;
  void keep_flags(bool travelled);
  std::vector<float> used_flags() const;
  at::Tensor flags_on_host() const;
  std::vector<bool> used_on_any_rank(const std::vector<bool>& used_anywhere) const;

  std::unique_ptr<Slots> slots_;  // which the transport refers to
  std::unique_ptr<Transport> transport_;
  BucketState state_ = BucketState::kFilling;
  size_t pending_ = 0;
  bool missed_ = false;
  bool checked_ = false;   // for NaN and infinity
  at::Tensor infinities_;  // what was found on a device; undefined: nobody looked there
  std::optional<UnreadFlags> unread_;
  std::unique_ptr<comm::InFlight> in_flight_;
};

}  // namespace fastsync::engine
