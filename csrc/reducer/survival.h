// State that lets a rank finish a step in which other ranks have died. See reducer_elastic.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/collective.h"
#include "reducer/bucket.h"

namespace fastsync::engine {

// This rank's own gradients of the running step, as they are before a bucket scales, sums or
// replaces them.
class OwnGradients {
 public:
  // `params` must stay valid as long as this object.
  explicit OwnGradients(const Parameters& params) : params_(params), grads_(params.size()) {}

  // Keeps the gradient before a bucket takes it. A gradient that lives in the bucket is copied. Any
  // other is kept as it is: autograd made it, and it would be freed once it is packed.
  void keep(size_t param, bool in_bucket);
  // Notes the used parameters, at the end of the backward.
  void note_used();
  // Restore gradients and used flags to their state before any bucket took them.
  void restore_gradients() const;
  void restore_used() const;
  void drop();

 private:
  const Parameters& params_;
  std::vector<at::Tensor> grads_;  // by parameter; undefined: no bucket has taken it
  std::vector<bool> used_;
};

// An all-reduce of one number, which each rank starts once it has all averages of a step. It runs
// on the host, which waits for it.
class Vote {
 public:
  void start(comm::Collective& group);
  comm::InFlight& in_flight() { return *in_flight_; }
  // Ends the vote: the sum has arrived, or is no longer awaited.
  void end() { in_flight_.reset(); }
  // Drops the vote and its buffer: the group changes.
  void drop();

 private:
  at::Tensor sum_;
  std::unique_ptr<comm::InFlight> in_flight_;
};

// The survivors' decision about the running step.
enum class Verdict : int64_t {
  kFails,  // no rank has died: the error stands
  kTake,   // all survivors have all its averages, and take them
  kAgain,  // the survivors alone average it again
};

struct Survivors {
  // Returns the verdict once all survivors have met. Called with the number of steps that this rank
  // has finished, whether it has all averages of the next one, and its error.
  std::function<int64_t(int64_t steps, bool complete, const std::string& error)> meet;
  // Makes the reducer average over the survivors from now on.
  std::function<void()> rebuild;
  std::chrono::milliseconds timeout;  // for a collective of a device
};

struct Survival {
  explicit Survival(const Parameters& params) : own(params) {}

  Survivors survivors;
  OwnGradients own;
  Vote vote;
  std::exception_ptr fault;  // of the running step, in which nothing more is sent
  bool complete = false;     // this rank has all averages of the running step
};

}  // namespace fastsync::engine
