// Waits of a unit for other ranks, and cleanup of abandoned ones.
#include <utility>

#include "fsdp/param_group.h"

namespace fastsync::engine {

int64_t Unit::bytes_leaving(Direction direction, const UnitLayout& layout) const {
  const bool gathers = direction == Direction::kGather;
  const auto each =
      static_cast<int64_t>(c10::elementSize(gathers ? dtypes_.compute : dtypes_.reduce));
  if (!by_messages()) return (ranks_ - 1) * layout.chunk * each;
  int64_t sent = (ranks_ - 1) * layout.packed;
  for (const UnitPlace& place : layout.places) {
    if (!place.direct) continue;
    const int64_t own = share_of(place.member, rank_).numel;
    sent += gathers ? (ranks_ - 1) * own : members_[place.member].numel() - own;
  }
  return sent * each;
}

std::unique_ptr<Movement> Unit::begin(Direction direction, int64_t bytes) const {
  return std::make_unique<Movement>(links_->peers, name_, direction, bytes);
}

void Unit::add_up_when_there(const std::shared_ptr<Reduction>& reduction) {
  reduction->added = links_->adder.submit([this, reduction, done = reduction->movement->on_done()] {
    reduction->in_flight->wait();
    const std::lock_guard<std::mutex> lock(reduction->mutex);
    if (reduction->abandoned) return false;
    reduction->in_flight.reset();
    add_up(*reduction);
    if (done) done();
    return false;
  });
}

void Unit::abandon(Reduction& reduction) {
  const std::lock_guard<std::mutex> lock(reduction.mutex);
  reduction.abandoned = true;
}

void Unit::await(Reduction& reduction) {
  if (reduction.added) {
    reduction.movement->await([&](auto time) { return reduction.added->is_done_within(time); },
                              [&] { reduction.added->wait(); });
  } else {
    reduction.movement->await(nullptr, [&] {
      if (reduction.in_flight) reduction.in_flight->wait();
    });
  }
}

}  // namespace fastsync::engine
