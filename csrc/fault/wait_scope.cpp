#include "fault/wait_scope.h"

#include <chrono>
#include <utility>

namespace fastsync::engine {

WaitScope::WaitScope(std::shared_ptr<FaultWatch> watch, Kind kind, const std::string& label,
                     std::vector<int64_t> ranks)
    : watch_(std::move(watch)),
      kind_(kind),
      backoff_(watch_->new_backoff()),
      before_(static_cast<Phase>(watch_->wait_scopes().now().phase)),
      since_(FaultWatch::Clock::now()) {
  Progress& wait_scopes = watch_->wait_scopes();
  if (kind_ == Kind::kTogether) {
    wait_scopes.issue();
    wait_scopes.reach(Phase::kTogether);
  } else if (kind_ == Kind::kWrapping) {
    wait_scopes.reach(Phase::kWrapping);
  }
  expected_.model = kWaitScopes;
  expected_.issued = kind_ == Kind::kTogether ? wait_scopes.issued() : kUncounted;
  expected_.label = label;
  expected_.ranks = std::move(ranks);
}

double WaitScope::waited() const {
  return std::chrono::duration<double>(FaultWatch::Clock::now() - since_).count();
}

void WaitScope::look() { watch_->look(expected_, waited(), backoff_); }

void WaitScope::explain(const std::string& error) { watch_->explain(expected_, error, waited()); }

void WaitScope::end(bool came) {
  if (kind_ == Kind::kTogether && !came) watch_->wait_scopes().take_back();
  watch_->wait_scopes().reach(before_);
}

}  // namespace fastsync::engine
