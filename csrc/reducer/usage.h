// Checks which parameters a step left without gradient, and prepares the warning or error.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "reducer/bucket.h"

namespace fastsync::engine {

class UsageCheck {
 public:
  // `static_graph` promises that every step uses the parameters of the first one; `fail_on_unused`
  // that every step uses all.
  UsageCheck(const Parameters& params, int rank, bool static_graph, bool fail_on_unused)
      : params_(params),
        rank_(rank),
        static_graph_(static_graph),
        fail_on_unused_(fail_on_unused) {}

  void set_static_graph() { static_graph_ = true; }
  void set_rank(int rank) { rank_ = rank; }

  // At the end of a backward. `planned`: by index, whether a parameter is in a bucket.
  void end_backward(const std::vector<bool>& planned);
  // Called after it. Returns how the promise of a static graph was broken, in words; empty if it
  // was kept. `before`: the parameters that the last step used, empty before the first. After a
  // break every forward is refused.
  std::string find_change(const std::vector<bool>& planned, const std::vector<bool>& before);
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
  int rank_;
  bool static_graph_;
  bool fail_on_unused_;
  std::vector<bool> told_;  // by parameter: it was unused before
  std::vector<std::string> warning_;
  std::string next_error_;  // for one forward
  std::string refusal_;     // for all that follow
};

}  // namespace fastsync::engine
