#include "fault/wait_scope.h"

#include <chrono>
#include <utility>

namespace fastsync::engine {

Visit::Visit(std::shared_ptr<FaultWatch> watch, Kind kind, const std::string& place,
             std::vector<int64_t> ranks)
    : watch_(std::move(watch)),
      kind_(kind),
      patience_(watch_->new_patience()),
      before_(static_cast<Phase>(watch_->places().now().phase)),
      since_(FaultWatch::Clock::now()) {
  Progress& places = watch_->places();
  if (kind_ == Kind::kTogether) {
    places.issue();
    places.reach(Phase::kTogether);
  } else if (kind_ == Kind::kWrapping) {
    places.reach(Phase::kWrapping);
  }
  wanted_.model = kPlaces;
  wanted_.issued = kind_ == Kind::kTogether ? places.issued() : kUncounted;
  wanted_.place = place;
  wanted_.ranks = std::move(ranks);
}

double Visit::waited() const {
  return std::chrono::duration<double>(FaultWatch::Clock::now() - since_).count();
}

void Visit::look() { watch_->look(wanted_, waited(), patience_); }

void Visit::explain(const std::string& error) { watch_->explain(wanted_, error, waited()); }

void Visit::end(bool came) {
  if (kind_ == Kind::kTogether && !came) watch_->places().take_back();
  watch_->places().reach(before_);
}

}  // namespace fastsync::engine
