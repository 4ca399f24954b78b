// How a unit's gradients become sums of this rank's shares.
#include <ATen/core/grad_mode.h>

#include <utility>

#include "check.h"
#include "fsdp/param_group.h"
#include "ops/buffers.h"
#include "ops/ops.h"
#include "transport/coding.h"

namespace fastsync::engine {
namespace {

// Returns the dtype of sums, whatever dtype travels.
at::ScalarType wide(at::ScalarType stored) { return stored == at::kDouble ? stored : at::kFloat; }

}  // namespace

// Returns a gradient in the form that a message needs: contiguous, of the dtype that travels.
at::Tensor Unit::ready_to_send(const at::Tensor& gradient, size_t member) const {
  const UnitMember& its = members_.at(member);
  if (!gradient.defined()) return ops::make_zeros(its.sizes, dtypes_.reduce, device_);
  if (gradient.scalar_type() == dtypes_.reduce && gradient.is_contiguous() && !gradient.is_conj() &&
      !gradient.is_neg()) {
    return gradient;
  }
  const at::Tensor copy = ops::make_scratch(its.sizes, dtypes_.reduce, device_);
  copy.copy_(gradient);
  return copy;
}

void Unit::pack_gradients(Reduction& reduction, const std::vector<at::Tensor>& gradients) const {
  const UnitLayout& layout = reduction.layout;
  const UnitCodes* codes = reduction.codes.get();
  std::vector<float> all_used;
  ops::ItemList items;
  for (size_t i = 0; i < layout.places.size(); ++i) {
    const UnitPlace& place = layout.places[i];
    at::Tensor gradient = gradients[i];
    const float used = gradient.defined() ? 1.0F : 0.0F;
    all_used.push_back(used);
    if (place.direct) {
      reduction.direct[i] = ready_to_send(gradient, place.member);
    } else if (gradient.defined() && (!gradient.is_contiguous() || gradient.is_neg())) {
      const at::Tensor copy = ops::make_scratch(gradient.sizes(), gradient.scalar_type(), device_);
      copy.copy_(gradient);
      gradient = copy;
    }
    for (int r = 0; r < ranks_; ++r) {
      const int64_t chunk = r * (codes ? codes->chunk_numel() : layout.packed);
      if (place.direct) continue;
      const UnitShare share = share_of(place.member, r);
      at::Tensor part;
      if (gradient.defined()) {
        part = ops::view_of(gradient, share.in_whole, gradient.scalar_type());
      }
      items.add(part, chunk + place.offset, share.in_whole);
    }
  }
  if (!codes) {
    for (int r = 0; r < ranks_; ++r) add_flags(items, all_used, r * layout.packed + layout.flags);
    return items.pack(reduction.sent, reduction.scale);
  }
  const uint64_t seed = codes->seed_of(reduction.step);
  codes->encode(items.items(), all_used, reduction.sent, {reduction.scale, seed});
}

// Whether the chunk of the first other rank is received in the buffer of the sums: its terms come
// first or, for rank 0, second of two, so it suffices that the dtype is that of the sums.
bool Unit::first_in_sums() const { return dtypes_.reduce == wide(dtypes_.stored); }

// Returns the buffer in which the chunk of another rank is received.
at::Tensor Unit::chunk_from(const Reduction& reduction, int rank) const {
  int64_t slot = rank < rank_ ? rank : rank - 1;
  if (first_in_sums()) {
    if (slot == 0) return reduction.sums;
    --slot;
  }
  return ops::run_of(reduction.received, slot * reduction.layout.chunk, reduction.layout.chunk);
}

std::vector<comm::Message> Unit::to_others(const Reduction& reduction) const {
  const UnitLayout& layout = reduction.layout;
  std::vector<comm::Message> sent;
  for (int r = 0; r < ranks_; ++r) {
    if (r == rank_) continue;
    sent.push_back({r, ops::run_of(reduction.sent, r * layout.packed, layout.packed)});
    for (size_t i = 0; i < layout.places.size(); ++i) {
      const UnitPlace& place = layout.places[i];
      if (!place.direct) continue;
      const UnitShare theirs = share_of(place.member, r);
      if (theirs.numel == 0) continue;
      sent.push_back({r, ops::run_of(reduction.direct[i], theirs.in_whole.offset, theirs.numel)});
    }
  }
  return sent;
}

void Unit::send_gradients(Reduction& reduction) {
  const int tag = tag_ + 1;
  comm::Collective& ranks = *links_->ranks;
  std::vector<comm::Expected> expected;
  for (int r = 0; r < ranks_; ++r) {
    if (r != rank_) expected.push_back({r, numel_side_by_side(reduction.layout, rank_)});
  }
  reduction.in_place = ranks.borrow(expected, dtypes_.reduce, to_others(reduction), tag);
  if (!reduction.in_place) return receive_gradients(reduction);
  reduction.in_flight = std::make_unique<comm::SharedInFlight>(reduction.in_place);
  keep_own(reduction);
}

void Unit::receive_gradients(Reduction& reduction) {
  const UnitLayout& layout = reduction.layout;
  const int64_t others = ranks_ - (first_in_sums() ? 2 : 1);
  reduction.received = links_->pool.take(others * layout.chunk, dtypes_.reduce, device_);
  std::vector<comm::Message> received;
  for (int r = 0; r < ranks_; ++r) {
    if (r == rank_) continue;
    const at::Tensor chunk = chunk_from(reduction, r);
    received.push_back({r, ops::run_of(chunk, 0, layout.packed)});
    for (const UnitPlace& place : layout.places) {
      const int64_t mine = share_of(place.member, rank_).numel;
      if (place.direct && mine > 0) received.push_back({r, ops::run_of(chunk, place.offset, mine)});
    }
  }
  reduction.in_flight =
      links_->ranks->exchange(std::move(received), to_others(reduction), tag_ + 1);
}

// Keeps only this rank's part: the others' parts have been copied.
void Unit::keep_own(Reduction& reduction) {
  if (rank_ < 2) {
    add_own(reduction, false);
  } else {
    reduction.own = links_->pool.take(reduction.layout.chunk, dtypes_.reduce, device_);
    take_own(reduction, reduction.own, 1.0, false);
  }
  links_->pool.give(std::exchange(reduction.sent, {}));
}

void Unit::send(Reduction& reduction) {
  const int64_t chunk = reduction.layout.chunk;
  if (reduction.codes) {
    reduction.received = links_->pool.take(reduction.codes->bytes(), at::kByte, device_);
    reduction.in_flight = reduction.codes->scatter(reduction.received, reduction.sent);
  } else if (!by_messages()) {
    const bool same = first_in_sums();
    reduction.received = same ? reduction.sums : links_->pool.take(chunk, dtypes_.reduce, device_);
    reduction.in_flight = links_->ranks->reduce_scatter(reduction.received, reduction.sent);
  } else {
    send_gradients(reduction);
  }
}

// Returns the buffer for the data that this rank sends.
at::Tensor Unit::room_to_send(Reduction& reduction) {
  const UnitLayout& layout = reduction.layout;
  if (!layout.codes) return links_->pool.take(ranks_ * layout.packed, dtypes_.reduce, device_);
  reduction.step = coded_reductions_++;
  reduction.codes = std::make_unique<UnitCodes>(*layout.codes, links_->ranks, device_, tag_ + 1);
  return links_->pool.take(reduction.codes->bytes(), at::kByte, device_);
}

void Unit::start_reduce(UnitLayout layout, std::vector<at::Tensor> gradients, ops::Scale scale) {
  FS_CHECK(!reduction_, "a unit's gradients are reduced while its former ones still travel");
  FS_CHECK_VALUE(gradients.size() == layout.places.size(), "expects a gradient for each of ",
                 layout.places.size(), " members, but got ", gradients.size());
  const at::NoGradGuard no_grad;
  auto made = std::make_shared<Reduction>();
  made->layout = std::move(layout);
  made->direct.resize(gradients.size());
  made->scale = std::move(scale);
  made->sent = room_to_send(*made);
  pack_gradients(*made, gradients);
  gradients.clear();
  const int64_t chunk = made->layout.chunk;
  made->transfer =
      begin(Direction::kReduce, made->codes ? made->codes->sent_bytes()
                                            : bytes_leaving(Direction::kReduce, made->layout));
  made->sums = ops::make_scratch({chunk}, wide(dtypes_.stored), device_);
  if (ranks_ > 1) send(*made);
  if (ranks_ > 1 && by_messages()) {
    add_up_when_there(made);
  } else if (auto done = made->transfer->on_done(); done && made->in_flight) {
    made->in_flight->on_done(std::move(done));
  }
  reduction_ = std::move(made);
}

at::Tensor Unit::finish_reduce() {
  FS_CHECK(reduction_, "no gradients of this unit are under way");
  const at::NoGradGuard no_grad;
  const auto reduction = std::move(reduction_);
  try {
    await(*reduction);
  } catch (...) {
    abandon(*reduction);
    throw;
  }
  if (!reduction->added) add_up(*reduction);
  links_->pool.give(reduction->sent);
  links_->pool.give(reduction->received);
  links_->pool.give(reduction->own);
  reduction->transfer->arrived();
  return reduction->sums;
}

void Unit::add_up(Reduction& reduction) const {
  const at::NoGradGuard no_grad;
  const int64_t chunk = reduction.layout.chunk;
  if (reduction.codes) return add_codes(reduction);
  if (reduction.in_place) return add_in_place(reduction);
  if (!by_messages() && ranks_ > 1) {
    if (reduction.received.is_same(reduction.sums)) {  // the backend has summed there
      reduction.received.reset();
      return;
    }
    ops::ItemList items;
    items.add_run(reduction.sums, 0, chunk);
    items.unpack(reduction.received, 1.0, false);
    return;
  }
  const bool first_is_there = first_in_sums() && ranks_ > 1;
  if (first_is_there) add_received(reduction, reduction.sums, false);
  const int first = rank_ == 0 ? 1 : 0;
  if (first_is_there && rank_ == 0) add_own(reduction, true);
  for (int r = 0; r < ranks_; ++r) {
    if (first_is_there && (r == first || r < first)) continue;
    if (r == rank_) {
      add_own(reduction, r > 0);
    } else {
      add_received(reduction, chunk_from(reduction, r), r > 0);
    }
  }
}

void Unit::add_codes(const Reduction& reduction) const {
  const UnitLayout& layout = reduction.layout;
  ops::ItemList items;
  for (const UnitPlace& place : layout.places) {
    const int64_t numel = share_of(place.member, rank_).numel;
    items.add_run(ops::run_of(reduction.sums, place.offset, numel), place.offset, numel);
  }
  const auto count = static_cast<int64_t>(layout.places.size());
  reduction.codes->sum(reduction.received, items.items(),
                       ops::run_of(reduction.sums, layout.flags, count));
}

// The sums already hold this rank's part, unless it waits for its turn.
void Unit::add_in_place(Reduction& reduction) const {
  const std::vector<at::Tensor>& parts = reduction.in_place->parts();
  if (!reduction.own.defined()) {
    for (const at::Tensor& part : parts) add_part(reduction, part, true);
  } else {
    for (size_t r = 0; r < static_cast<size_t>(ranks_); ++r) {
      const auto self = static_cast<size_t>(rank_);
      if (r == self) {
        add_received(reduction, reduction.own, true);
      } else {
        add_part(reduction, parts[r < self ? r : r - 1], r > 0);
      }
    }
  }
  reduction.in_place->release();
}

void Unit::add_own(Reduction& reduction, bool accumulate) const {
  take_own(reduction, reduction.sums, reduction.scale, accumulate);
}

// Frees each large gradient once its terms are added.
void Unit::take_own(Reduction& reduction, const at::Tensor& to, const ops::Scale& scale,
                    bool accumulate) const {
  const UnitLayout& layout = reduction.layout;
  ops::ItemList packed;
  packed.add_run(ops::run_of(to, 0, layout.packed), rank_ * layout.packed, layout.packed);
  packed.unpack(reduction.sent, 1.0, accumulate);
  for (size_t i = 0; i < layout.places.size(); ++i) {
    const UnitPlace& place = layout.places[i];
    if (!place.direct) continue;
    const UnitShare mine = share_of(place.member, rank_);
    const at::Tensor gradient = std::exchange(reduction.direct[i], at::Tensor());
    ops::ItemList items;
    items.add_run(ops::run_of(to, place.offset, mine.numel), mine.in_whole.offset, mine.numel);
    items.unpack(ops::run_of(gradient, 0, gradient.numel()), scale, accumulate);
  }
}

// `chunk` may be the sums themselves, which are then scaled in place.
void Unit::add_received(const Reduction& reduction, const at::Tensor& chunk,
                        bool accumulate) const {
  const bool in_place = chunk.is_same(reduction.sums);
  if (!in_place) add_packed(reduction, chunk, accumulate);
  if (in_place && reduction.scale.is_one()) return;
  add_direct(reduction, chunk, /*side_by_side=*/false, accumulate);
}

// Adds the part of a rank, in its memory.
void Unit::add_part(const Reduction& reduction, const at::Tensor& part, bool accumulate) const {
  add_packed(reduction, part, accumulate);
  add_direct(reduction, part, /*side_by_side=*/true, accumulate);
}

void Unit::add_packed(const Reduction& reduction, const at::Tensor& from, bool accumulate) const {
  const int64_t packed = reduction.layout.packed;
  ops::ItemList items;
  items.add_run(ops::run_of(reduction.sums, 0, packed), 0, packed);
  items.unpack(from, 1.0, accumulate);
}

void Unit::add_direct(const Reduction& reduction, const at::Tensor& from, bool side_by_side,
                      bool accumulate) const {
  const UnitLayout& layout = reduction.layout;
  int64_t next = layout.packed;
  ops::ItemList items;
  for (const UnitPlace& place : layout.places) {
    if (!place.direct) continue;
    const int64_t numel = share_of(place.member, rank_).numel;
    items.add_run(ops::run_of(reduction.sums, place.offset, numel),
                  side_by_side ? next : place.offset, numel);
    next += numel;
  }
  items.unpack(from, reduction.scale, accumulate);
}

namespace {

// Returns how many ranks had a gradient for each member; ones if this rank missed none.
std::vector<double> uses_of(const UnitLayout& layout, const at::Tensor& sums, bool missed) {
  if (!missed) return std::vector<double>(layout.places.size(), 1.0);
  const auto count = static_cast<int64_t>(layout.places.size());
  const at::Tensor flags = ops::run_of(sums, layout.flags, count).to(at::kCPU, at::kDouble);
  const auto* const values = flags.const_data_ptr<double>();
  return {values, values + count};
}

}  // namespace

std::vector<at::Tensor> Unit::deliver(const UnitLayout& layout, const at::Tensor& sums,
                                      const std::vector<at::Tensor>& before, bool missed) const {
  const at::NoGradGuard no_grad;
  FS_CHECK_VALUE(before.size() == layout.places.size(), "expects as many gradients as members");
  const std::vector<double> used = uses_of(layout, sums, missed);
  std::vector<at::Tensor> results(layout.places.size());
  ops::ItemList fresh;
  ops::ItemList accumulated;
  for (size_t i = 0; i < layout.places.size(); ++i) {
    if (used[i] == 0.0) continue;
    const UnitPlace& place = layout.places[i];
    const UnitShare mine = share_of(place.member, rank_);
    const auto in_sums = ops::compact(place.offset, mine.numel, mine.sizes);
    if (before[i].defined()) {
      accumulated.add(before[i], place.offset, in_sums);
      results[i] = before[i];
    } else if (sums.scalar_type() == dtypes_.stored) {
      // Gives each gradient a storage of its own, so that it can be pickled. On other devices
      // record_stream() needs the storage of their allocator.
      const c10::Storage own = sums.is_cpu() ? ops::part_of(sums, in_sums) : c10::Storage();
      results[i] = ops::view_of(sums, in_sums, dtypes_.stored, own);
    } else {
      results[i] = ops::make_scratch(mine.sizes, dtypes_.stored, sums.device());
      fresh.add(results[i], place.offset, in_sums);
    }
  }
  fresh.unpack(sums, 1.0, false);
  accumulated.unpack(sums, 1.0, true);
  return results;
}

void Unit::add_up_when_there(const std::shared_ptr<Reduction>& reduction) {
  reduction->added = links_->adder.submit([this, reduction, done = reduction->transfer->on_done()] {
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
    reduction.transfer->await([&](auto time) { return reduction.added->is_done_within(time); },
                              [&] { reduction.added->wait(); });
  } else {
    reduction.transfer->await(nullptr, [&] {
      if (reduction.in_flight) reduction.in_flight->wait();
    });
  }
}

}  // namespace fastsync::engine
