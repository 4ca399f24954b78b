// What a rank keeps so that a step can still be finished after other ranks have died in it. See
// reducer_elastic.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../comm/collective.h"
#include "bucket.h"

namespace fastsync::engine {

// This rank's own gradients of the running step, as they are before a bucket scales, sums or
// replaces them.
class OwnGradients {
 public:
  // The parameters must outlive it.
  explicit OwnGradients(const Parameters& params) : params_(params), grads_(params.size()) {}

  // Before a bucket takes the gradient. One that lives in the bucket is copied. Any other is kept
  // as it is: what autograd has made, and would free once it is packed.
  void keep(size_t param, bool in_bucket);
  // Which parameters have been used, at the end of the backward.
  void note_used();
  // Gradients and used flags, as before any bucket took them.
  void restore_gradients() const;
  void restore_used() const;
  void drop();

 private:
  const Parameters& params_;
  std::vector<at::Tensor> grads_;  // by parameter; undefined: no bucket has taken it
  std::vector<bool> used_;
};

// One number, summed over the ranks once each has all averages of a step: on the host, which waits
// for it.
class Vote {
 public:
  void start(comm::Collective& group);
  comm::InFlight& in_flight() { return *in_flight_; }
  // The sum is back, or nobody waits for it any more.
  void end() { in_flight_.reset(); }
  // The ranks are others from now on.
  void drop();

 private:
  at::Tensor sum_;
  std::unique_ptr<comm::InFlight> in_flight_;
};

// What the survivors of a death do with the running step.
enum class Verdict : int64_t {
  kFails,  // nobody has died: the error is what it is
  kTake,   // all survivors have all its averages, and take them
  kAgain,  // its averages are made again, by the survivors alone
};

struct Survivors {
  // Returns once all survivors have met: called with the steps that this rank has finished, whether
  // it has all averages of the next one, and the error that it has met.
  std::function<int64_t(int64_t steps, bool complete, const std::string& error)> meet;
  // Has the reducer average over the survivors from now on.
  std::function<void()> rebuild;
  std::chrono::milliseconds patience;  // with a collective of a device
};

struct Survival {
  explicit Survival(const Parameters& params) : own(params) {}

  Survivors survivors;
  OwnGradients own;
  Vote vote;
  std::exception_ptr fault;  // of the running step; nothing more is sent in it
  bool complete = false;     // this rank has all averages of the running step
};

}  // namespace fastsync::engine
