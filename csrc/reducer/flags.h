// Used flags for buckets that carry none, because a communication hook owns them: one small
// all-reduce of their own.
//
// There is no vote: hooks keep states per bucket (PowerSGD's errors, ZeRO's shards), so under a
// hook the plan made after the first step stays, as it does in DDP, unless parameters are unfrozen.
//
// The all-reduce starts when the last gradient is known, while buckets are in flight, and is waited
// for after them. On a CPU it needs a process group of its own, or memory that the ranks share:
// hooks may start collectives when earlier ones are done, at times that differ between ranks. On
// devices one thread enqueues all collectives, in one order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "comm/collective.h"

namespace fastsync::engine {

class FlagExchange {
 public:
  // `group`: of the ranks. `own`: only this object uses it.
  FlagExchange(std::shared_ptr<comm::Collective> group, bool own)
      : group_(std::move(group)), own_(own) {}

  // Whether the exchange may start while hooks are running.
  bool overlaps(at::Device device) const { return own_ || !device.is_cpu(); }
  bool started() const { return in_flight_ != nullptr; }
  // `used`: by parameter, whether this rank had a gradient.
  void start(const std::vector<bool>& used, at::Device device);
  // Waits, and returns which parameters any rank used, by index; empty if this rank used all of
  // them. `arrives`: returns once the given collective is done.
  std::vector<bool> wait(const std::function<void(comm::InFlight&)>& arrives);
  void abandon();
  // Returns how many ranks used each parameter in the last step; empty before the first step and
  // after an abandoned one.
  std::vector<int64_t> counts() const;

 private:
  std::shared_ptr<comm::Collective> group_;
  bool own_;
  bool missed_ = false;  // this rank lacks a gradient
  at::Tensor sum_;
  std::unique_ptr<comm::InFlight> in_flight_;
};

}  // namespace fastsync::engine
