// One bucket: the gradients that travel together, and the states they pass through in a step.
//
//   kFilling ──all gradients ready──▶ kReady ──pack()──▶ kPacked ──launch()──▶ kInFlight
//       ▲                                                                          │ receive()
//       └───────────────────────────────finish()───────────────────────────── kReceived
//
// The bucket counts the gradients that have arrived and knows which are missing. Its transport
// turns gradients into averages.
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

#include "comm/collective.h"
#include "transport/choose.h"

namespace fastsync::engine {

enum class BucketState { kFilling, kReady, kPacked, kInFlight, kReceived };
const char* to_string(BucketState state);

using Parameters = std::vector<std::unique_ptr<Parameter>>;

// [Note: flags that stay on a device]
// On a device, gradients are checked for NaN and infinity without the host: the result is added to
// the used flags before they travel. The sums of the flags stay on the device, too, until the
// script asks which averages are not finite. The host then waits once.
struct UnreadFlags {
  std::vector<Parameter*> params;
  std::vector<bool> added;  // to averages that were there before
  at::Tensor sums;          // over ranks, fp32, one per parameter
  at::Tensor own;           // likewise; infinity if this rank's gradient held NaN or infinity
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
  // Which ranks average it; see [Note: groups].
  size_t group() const { return group_; }
  // Whether this rank had no gradient for some slot in this step.
  bool missed() const { return missed_; }

  // Notes a gradient that has arrived, computed on `stream`. Returns whether it completes the
  // bucket. If a gradient arrives more often than expected, later steps expect as many arrivals.
  bool mark_ready(size_t slot, std::optional<c10::Stream> stream);
  // Offers the transport a gradient that has arrived ahead of its bucket.
  void offer(size_t slot, const Packing& how);
  // Whether another gradient for this slot would come too late.
  bool is_final(size_t slot) const { return (*slots_)[slot].early && transport_->takes_once(); }
  int accumulations(size_t slot) const { return (*slots_)[slot].accumulations; }
  bool complete() const { return pending_ == 0; }
  // Ends the backward: a slot that received no gradient takes the one that its parameter has.
  void close();
  // Checks the gradients for NaN and infinity. pack() does so if its Packing asks for it; a single
  // rank calls this and note_finite() instead.
  void check_finite();

  // Makes the current stream wait for the streams that computed the gradients, before they are
  // read. pack() does so, too.
  void wait_for_producers() const;
  // kReady -> kPacked
  void pack(Packing how);
  // kPacked -> kInFlight
  void launch();
  // In flight: calls `fn` once the collective has completed; see comm::InFlight::on_done.
  void on_done(std::function<void()> fn) { in_flight_->on_done(std::move(fn)); }
  // In flight: whether arrives_within() can wait.
  bool can_be_asked() const { return in_flight_->can_be_asked(); }
  // In flight: whether the result arrives within `time`, so that receive() does not wait.
  bool arrives_within(std::chrono::milliseconds time) { return in_flight_->is_done_within(time); }
  // kInFlight -> kReceived. Waits for the result.
  void receive();
  // kReceived -> kFilling. Sets the gradient of every used parameter to the average.
  // `used_anywhere`, by parameter index, replaces the flags; empty: the flags that travelled count.
  void finish(const std::vector<bool>& used_anywhere);
  // Notes which averages hold NaN or infinity: by the flags if they `travelled`, else by this
  // rank's own check.
  void note_finite(bool travelled);
  // Returns and forgets the flags that note_finite() has left on the device; see
  // [Note: flags that stay on a device].
  std::optional<UnreadFlags> take_unread() { return std::exchange(unread_, std::nullopt); }
  // Any state -> kFilling. Drops the remains of a failed backward.
  void abandon();

  // Returns how many ranks used each parameter, fp32, as the flags that travelled with the
  // gradients say. Undefined without flags.
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
  size_t group_;
  BucketState state_ = BucketState::kFilling;
  size_t pending_ = 0;
  bool missed_ = false;
  bool checked_ = false;   // for NaN and infinity
  at::Tensor infinities_;  // result of the check on a device; undefined: not checked
  std::optional<UnreadFlags> unread_;
  std::unique_ptr<comm::InFlight> in_flight_;
};

}  // namespace fastsync::engine
