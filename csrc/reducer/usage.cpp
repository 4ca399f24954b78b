#include "reducer/usage.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "check.h"

namespace fastsync::engine {
namespace {

constexpr size_t kNamesShown = 20;

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kNamesShown); ++i) {
    text += (i == 0 ? "" : ", ") + names[i];
  }
  if (names.size() > kNamesShown) text += concat(" and ", names.size() - kNamesShown, " more");
  return text;
}

}  // namespace

bool UsageCheck::is_unused(size_t param, const std::vector<bool>& planned) const {
  return planned[param] && !params_[param]->used && params_[param]->tensor.requires_grad();
}

void UsageCheck::end_backward(const std::vector<bool>& planned) {
  RECORD_FUNCTION("fastsync::search_unused_parameters", std::vector<c10::IValue>());
  std::vector<std::string> names;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (is_unused(i, planned)) names.push_back(params_[i]->name);
  }
  if (names.empty()) return;
  if (options_.fail_on_unused && !options_.static_graph) {
    next_error_ = concat(
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        "This error indicates that your module has parameters that were not used in producing "
        "loss. Leave find_unused_parameters out to have fastsync handle them, or do so by passing "
        "the keyword argument `find_unused_parameters=True` to FastDDP; otherwise make sure that "
        "all `forward` function outputs participate in calculating loss. The parameters are named "
        "here; there is no need to set the environment variable TORCH_DISTRIBUTED_DEBUG to either "
        "INFO or DETAIL.\nParameters which did not receive grad for rank ",
        rank_, ": ", join(names), "\nParameter indices which did not receive grad for rank ", rank_,
        ":", unused_indices(planned));
  } else if (tell(planned)) {
    warning_ = std::move(names);
  }
}

// Notes the unused parameters. Returns whether one is unused for the first time.
bool UsageCheck::tell(const std::vector<bool>& planned) {
  told_.resize(params_.size());
  bool first = false;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!is_unused(i, planned)) continue;
    first = first || !told_[i];
    told_[i] = true;
  }
  return first;
}

std::string UsageCheck::unused_indices(const std::vector<bool>& planned) const {
  std::string indices;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (is_unused(i, planned)) indices += concat(" ", i);
  }
  return indices;
}

// static_graph promises that every step uses the parameters of the first one. The averages are
// right in any case, so all ranks finish the step before one of them complains.
std::string UsageCheck::find_change(const std::vector<bool>& planned) {
  if (!options_.static_graph) return "";
  std::vector<bool> now;
  for (const auto& param : params_) now.push_back(param->arrived());
  const std::vector<bool> before = std::exchange(arrived_, now);
  if (before.empty()) return "";
  std::vector<std::string> changed;
  for (size_t i = 0; i < params_.size(); ++i) {
    const Parameter& param = *params_[i];
    if (now[i] && !before[i]) {
      changed.push_back(concat(param.name, " (unused before)"));
    } else if (before[i] && !now[i] && planned[i] && param.tensor.requires_grad()) {
      changed.push_back(concat(param.name, " (used before)"));
    }
  }
  if (changed.empty()) return "";
  refusal_ = concat(
      "Expected to have finished reduction in the prior iteration before starting a new one. This "
      "error indicates that your training graph has changed in this iteration, e.g., one parameter "
      "is used in first iteration, but then got unused in the second iteration. this is not "
      "compatible with static_graph set to True.\nParameter indices which did not receive grad "
      "for rank ",
      rank_, ":", unused_indices(planned));
  return concat("Your training graph has changed in this iteration, on rank ", rank_, ": ",
                join(changed), ". This is not compatible with static_graph set to True");
}

void UsageCheck::check_forward() {
  FS_CHECK(refusal_.empty(), refusal_);
  const std::string error = std::exchange(next_error_, std::string());
  FS_CHECK(error.empty(), error);
}

std::vector<std::string> UsageCheck::take_warning() { return std::exchange(warning_, {}); }

}  // namespace fastsync::engine
