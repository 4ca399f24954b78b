// Checks which parameters a step left without gradient, and prepares the warning or error.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "reducer/bucket.h"

namespace fastsync::engine {

struct ReducerOptions {
  bool skip_unused = false;     // leave out buckets without a gradient, the same on every rank
  bool static_graph = false;    // learn how often each gradient arrives before overlapping
  bool fail_on_unused = false;  // find_unused_parameters=False was passed
  bool check_finite = false;    // for NaN and infinity
  bool may_skip = false;        // see [Note: skipped steps]
};

class UsageCheck {
 public:
  // `options` promise that every step uses the parameters of the first one (static_graph), or all
  // (fail_on_unused). They may change.
  UsageCheck(const Parameters& params, const ReducerOptions& options, int rank)
      : params_(params), options_(options), rank_(rank) {}

  void set_rank(int rank) { rank_ = rank; }

  // At the end of a backward. `planned`: by index, whether a parameter is in a bucket.
  void end_backward(const std::vector<bool>& planned);
  // Called after it. Returns how the promise of a static graph was broken since the last step, in
  // words; empty if it was kept, and in the first step. After a break every forward is refused.
  std::string find_change(const std::vector<bool>& planned);
  // Other parameters are trained from now on: the next step counts as the first.
  void forget() { arrived_.clear(); }
  // At a forward: throws the error of the last backward, if there is one.
  void check_forward();
  // Returns the parameters that the last step left without gradient, if one of them is unused for
  // the first time.
  std::vector<std::string> take_warning();

 private:
  bool is_unused(size_t param, const std::vector<bool>& planned) const;
  bool tell(const std::vector<bool>& planned);
  std::string unused_indices(const std::vector<bool>& planned) const;

  const Parameters& params_;
  const ReducerOptions& options_;
  int rank_;
  std::vector<bool> told_;     // by parameter: it was unused before
  std::vector<bool> arrived_;  // by parameter: its gradient did, in the last step
  std::vector<std::string> warning_;
  std::string next_error_;  // for one forward
  std::string refusal_;     // for all that follow
};

}  // namespace fastsync::engine
