// Parameters stored in one precision and used by forward and backward in a lower one.
//
// The parameters' data is replaced, as torch's DistributedDataParallel does: modules find
// low-precision data in their own parameters. The stored data is in place outside forward and
// backward; a backward counts from where it reaches the forward's outputs. Gradients arrive in the
// low precision and end in the stored one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "ops/ops.h"

namespace fastsync::engine {

class Precision : public std::enable_shared_from_this<Precision> {
 public:
  // Replaces the data of those `params` that are floating-point and of another dtype than
  // `compute`.
  Precision(std::vector<at::Tensor> params, at::ScalarType compute);

  at::ScalarType compute() const { return compute_; }
  bool converts(const at::Tensor& param) const;
  // Returns the storage dtype of a parameter whose data is replaced; nothing for others.
  std::optional<at::ScalarType> stored_dtype(const at::Tensor& param) const;
  // Called whenever low-precision data has been put in place.
  void on_exchange(std::function<void()> fn) { on_exchange_ = std::move(fn); }

  // Starts a forward: casts all parameters, by one kernel per device and stored dtype, and puts the
  // results in place.
  void begin_forward();
  void end_forward() { restore(); }
  // A backward has reached the outputs of a forward: puts the parameters that the forward used in
  // place.
  void begin_backward();
  // Inside a backward: puts the stored parameters back when the backward ends, whether it succeeds
  // or not.
  void restore_at_end();

 private:
  class Restoration;
  // The low-precision parameters of one device, side by side.
  struct Group {
    std::vector<size_t> members;
    std::vector<ops::SlotLayout> layouts;
    at::Tensor flat;
  };

  bool laid_out() const;
  void lay_out();
  Group& group_of(at::Device device);
  void lower();
  void restore();

  mutable std::recursive_mutex mutex_;
  std::vector<at::Tensor> params_;
  at::ScalarType compute_;
  std::function<void()> on_exchange_;
  std::vector<Group> groups_;
  std::vector<at::Tensor> low_;             // by parameter; undefined where nothing is replaced
  std::vector<at::Tensor> stored_;          // the stored data; empty while it is in place
  std::weak_ptr<Restoration> restoration_;  // that of the running backward
  int64_t forwards_ = 0;
};

}  // namespace fastsync::engine
