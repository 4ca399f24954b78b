#include "unit.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "../check.h"
#include "../ops/buffers.h"
#include "../ops/ops.h"

namespace fastsync::engine {
namespace {

// Sums are of this dtype whatever travels.
at::ScalarType wide(at::ScalarType stored) { return stored == at::kDouble ? stored : at::kFloat; }

ops::SlotLayout moved(ops::SlotLayout layout, int64_t by) {
  layout.offset += by;
  return layout;
}

}  // namespace

Unit::Unit(std::shared_ptr<UnitLinks> links, std::vector<UnitMember> members, UnitDTypes dtypes,
           at::Device device, int tag)
    : links_(std::move(links)),
      members_(std::move(members)),
      dtypes_(dtypes),
      device_(device),
      tag_(tag),
      rank_(links_->ranks->rank()),
      ranks_(links_->ranks->size()),
      whole_(members_.empty() ? 0 : members_.back().whole_offset + members_.back().numel(),
             dtypes.compute, device) {
  ops::check_supported(device);
}

Unit::~Unit() {
  if (reduction_) abandon(*reduction_);
}

at::Tensor Unit::whole(size_t member) const {
  const UnitMember& its = members_.at(member);
  return ops::view_of(whole_.flat(), compact(its.whole_offset, its.numel(), its.sizes),
                      dtypes_.compute);
}

void Unit::set_shard(const at::Tensor& shard, UnitLayout layout) {
  FS_CHECK_VALUE(shard.dim() == 1 && shard.numel() == layout.chunk &&
                     shard.scalar_type() == dtypes_.stored && shard.device() == device_,
                 "a unit's shard is of another size, dtype or device than it should be");
  release();
  shard_ = ops::view_of(shard, ops::SlotLayout::run(0, layout.chunk), dtypes_.stored);
  layout_ = std::move(layout);
}

// Copies the shares of `rank` to the whole members, from where its chunk begins in `flat`.
void Unit::fill_from(const at::Tensor& flat, int64_t begin, int rank, bool direct) {
  ItemList items;
  add_shares(items, begin, rank, direct);
  items.unpack(flat, 1.0, false);
}

void Unit::fill_from_codes() {
  ItemList items;
  for (int r = 0; r < ranks_; ++r)
    add_shares(items, r * gathered_codes_->chunk_numel(), r, /*direct=*/false);
  gathered_codes_->decode(items.items(), staging_);
  gathered_codes_.reset();
}

// The shares of `rank` in the whole members.
void Unit::add_shares(ItemList& items, int64_t begin, int rank, bool direct) const {
  for (const UnitPlace& place : layout_.places) {
    if (place.direct && !direct) continue;
    const UnitShare share = share_of(place.member, rank);
    const auto layout = moved(share.in_whole, members_[place.member].whole_offset);
    items.add(ops::view_of(whole_.flat(), layout, dtypes_.compute), begin + place.offset, layout);
  }
}

// The shard in the compute dtype.
at::Tensor Unit::source_of_gather() {
  if (dtypes_.stored == dtypes_.compute) return shard_;
  lowered_ = links_->pool.take(layout_.chunk, dtypes_.compute, device_);
  ItemList items;
  items.add_run(shard_, 0, layout_.chunk);
  items.pack(lowered_, 1.0);
  return lowered_;
}

at::Tensor Unit::lend() {
  const at::NoGradGuard no_grad;
  const int64_t numel = whole_.flat().numel();
  if (!whole_.has_memory()) whole_.lend(links_->pool.take(numel, dtypes_.compute, device_));
  return run_of(whole_.flat(), 0, numel);
}

void Unit::start_coded_gather() {
  gathered_codes_ = std::make_unique<UnitCodes>(*layout_.codes, links_->ranks, device_, tag_);
  staging_ = links_->pool.take(gathered_codes_->bytes(), at::kByte, device_);
  gather_ = begin(Direction::kGather, gathered_codes_->sent_bytes());
  gathering_ = gathered_codes_->gather(shard_, staging_);
  if (auto done = gather_->on_done()) gathering_->on_done(std::move(done));
}

void Unit::start_gather() {
  if (whole_.has_memory()) return;
  FS_CHECK(shard_.defined(), "a unit is gathered before it has any parameters");
  const at::NoGradGuard no_grad;
  try {
    begin_gather();
  } catch (...) {
    // Memory that nobody fills must not be taken for parameters.
    forget_gather();
    throw;
  }
}

// What was lent for it: somebody may still write there, so it goes to nobody else.
std::vector<at::Tensor> Unit::forget_gather() {
  gathered_codes_.reset();
  return {std::exchange(staging_, {}), std::exchange(lowered_, {}), whole_.take_back()};
}

void Unit::begin_gather() {
  lend();
  if (layout_.codes) return start_coded_gather();
  if (ranks_ > 1) gather_ = begin(Direction::kGather, bytes_leaving(Direction::kGather, layout_));
  fill_from(shard_, 0, rank_, /*direct=*/true);
  if (ranks_ == 1) return;
  const at::Tensor source = source_of_gather();
  staging_ = links_->pool.take(ranks_ * layout_.packed, dtypes_.compute, device_);
  if (!by_messages()) {
    gathering_ = links_->ranks->all_gather(staging_, source);
  } else {
    std::vector<comm::Message> received;
    std::vector<comm::Message> sent;
    const auto post = [](std::vector<comm::Message>& to, int rank, const at::Tensor& tensor) {
      if (tensor.numel() > 0) to.push_back({rank, tensor});
    };
    for (int r = 0; r < ranks_; ++r) {
      if (r == rank_) continue;
      post(received, r, run_of(staging_, r * layout_.packed, layout_.packed));
      post(sent, r, run_of(source, 0, layout_.packed));
      for (const UnitPlace& place : layout_.places) {
        if (!place.direct) continue;
        const UnitShare theirs = share_of(place.member, r);
        const int64_t begin = members_[place.member].whole_offset + theirs.in_whole.offset;
        post(received, r, run_of(whole_.flat(), begin, theirs.numel));
        post(sent, r, run_of(source, place.offset, share_of(place.member, rank_).numel));
      }
    }
    gathering_ = links_->ranks->exchange(std::move(received), std::move(sent), tag_);
  }
  if (auto done = gather_->on_done()) gathering_->on_done(std::move(done));
}

void Unit::finish_gather() {
  if (!gathering_) return;
  const at::NoGradGuard no_grad;
  const auto work = std::move(gathering_);
  const Movement::Arrives arrives = [&work](auto time) { return work->is_done_within(time); };
  try {
    gather_->await(work->can_be_asked() ? arrives : nullptr, [&work] { work->wait(); });
  } catch (...) {
    work->on_done([kept = forget_gather()] {});
    throw;
  }
  if (gathered_codes_) fill_from_codes();
  for (int r = 0; r < ranks_ && !layout_.codes; ++r) {
    if (r != rank_) fill_from(staging_, r * layout_.packed, r, /*direct=*/false);
  }
  links_->pool.give(std::exchange(staging_, at::Tensor()));
  links_->pool.give(std::exchange(lowered_, at::Tensor()));
  gather_->arrived();
}

void Unit::release() {
  finish_gather();
  links_->pool.give(whole_.take_back());
}

// A gradient as a message of its member's share needs it: contiguous, of the dtype that travels.
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
  ItemList items;
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
      if (!codes) items.add_run({}, chunk + layout.flags + static_cast<int64_t>(i), 1, used);
      if (place.direct) continue;
      const UnitShare share = share_of(place.member, r);
      at::Tensor part;
      if (gradient.defined()) {
        part = ops::view_of(gradient, share.in_whole, gradient.scalar_type());
      }
      items.add(part, chunk + place.offset, share.in_whole);
    }
  }
  if (!codes) return items.pack(reduction.sent, reduction.scale);
  const uint64_t seed = codes->seed_of(reduction.step);
  codes->encode(items.items(), all_used, reduction.sent, {reduction.scale, seed});
}

// Whether what comes from the first other rank is received where the sums will be: its terms are the first or, for rank 0, the
// second of two, and the dtype is that of the sums.
bool Unit::first_in_sums() const { return dtypes_.reduce == wide(dtypes_.stored); }

// Where the chunk of another rank is received.
at::Tensor Unit::chunk_from(const Reduction& reduction, int rank) const {
  int64_t slot = rank < rank_ ? rank : rank - 1;
  if (first_in_sums()) {
    if (slot == 0) return reduction.sums;
    --slot;
  }
  return run_of(reduction.received, slot * reduction.layout.chunk, reduction.layout.chunk);
}

void Unit::send_gradients(Reduction& reduction) {
  const UnitLayout& layout = reduction.layout;
  std::vector<comm::Message> received;
  std::vector<comm::Message> sent;
  for (int r = 0; r < ranks_; ++r) {
    if (r == rank_) continue;
    const at::Tensor chunk = chunk_from(reduction, r);
    received.push_back({r, run_of(chunk, 0, layout.packed)});
    sent.push_back({r, run_of(reduction.sent, r * layout.packed, layout.packed)});
    for (size_t i = 0; i < layout.places.size(); ++i) {
      const UnitPlace& place = layout.places[i];
      if (!place.direct) continue;
      const UnitShare mine = share_of(place.member, rank_);
      const UnitShare theirs = share_of(place.member, r);
      if (mine.numel > 0) received.push_back({r, run_of(chunk, place.offset, mine.numel)});
      if (theirs.numel > 0) {
        sent.push_back({r, run_of(reduction.direct[i], theirs.in_whole.offset, theirs.numel)});
      }
    }
  }
  reduction.in_flight = links_->ranks->exchange(std::move(received), std::move(sent), tag_ + 1);
}

void Unit::send(Reduction& reduction) {
  const int64_t chunk = reduction.layout.chunk;
  if (reduction.codes) {
    reduction.received = links_->pool.take(reduction.codes->bytes(), at::kByte, device_);
    reduction.in_flight = reduction.codes->scatter(reduction.received, reduction.sent);
  } else if (!by_messages()) {
    reduction.received = links_->pool.take(chunk, dtypes_.reduce, device_);
    reduction.in_flight = links_->ranks->reduce_scatter(reduction.received, reduction.sent);
  } else {
    const int64_t others = ranks_ - (first_in_sums() ? 2 : 1);
    reduction.received = links_->pool.take(others * chunk, dtypes_.reduce, device_);
    send_gradients(reduction);
  }
}

// Where what this rank sends is written.
at::Tensor Unit::room_to_send(Reduction& reduction) {
  const UnitLayout& layout = reduction.layout;
  if (!layout.codes) return links_->pool.take(ranks_ * layout.packed, dtypes_.reduce, device_);
  reduction.step = coded_reductions_++;
  reduction.codes = std::make_unique<UnitCodes>(*layout.codes, links_->ranks, device_, tag_ + 1);
  return links_->pool.take(reduction.codes->bytes(), at::kByte, device_);
}

void Unit::start_reduce(UnitLayout layout, std::vector<at::Tensor> gradients, double scale) {
  FS_CHECK(!reduction_, "a unit's gradients are reduced while its former ones still travel");
  FS_CHECK_VALUE(gradients.size() == layout.places.size(), "expects a gradient for each of ",
                 layout.places.size(), " members, but got ", gradients.size());
  const at::NoGradGuard no_grad;
  auto made = std::make_shared<Reduction>();
  made->layout = std::move(layout);
  made->direct.resize(gradients.size());
  made->scale = scale;
  made->sent = room_to_send(*made);
  pack_gradients(*made, gradients);
  gradients.clear();
  const int64_t chunk = made->layout.chunk;
  made->movement =
      begin(Direction::kReduce, made->codes ? made->codes->sent_bytes()
                                            : bytes_leaving(Direction::kReduce, made->layout));
  made->sums = ops::make_scratch({chunk}, wide(dtypes_.stored), device_);
  if (ranks_ > 1) send(*made);
  if (ranks_ > 1 && by_messages()) {
    add_up_when_there(made);
  } else if (auto done = made->movement->on_done(); done && made->in_flight) {
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
  reduction->movement->arrived();
  return reduction->sums;
}

void Unit::add_up(Reduction& reduction) const {
  const at::NoGradGuard no_grad;
  const int64_t chunk = reduction.layout.chunk;
  if (reduction.codes) return add_codes(reduction);
  if (!by_messages() && ranks_ > 1) {
    ItemList items;
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
  ItemList items;
  for (const UnitPlace& place : layout.places) {
    const int64_t numel = share_of(place.member, rank_).numel;
    items.add_run(run_of(reduction.sums, place.offset, numel), place.offset, numel);
  }
  const auto count = static_cast<int64_t>(layout.places.size());
  reduction.codes->sum(reduction.received, items.items(),
                       run_of(reduction.sums, layout.flags, count));
}

// Lets go of each large gradient after its terms.
void Unit::add_own(Reduction& reduction, bool accumulate) const {
  const UnitLayout& layout = reduction.layout;
  ItemList packed;
  packed.add_run(run_of(reduction.sums, 0, layout.packed), rank_ * layout.packed, layout.packed);
  packed.unpack(reduction.sent, 1.0, accumulate);
  for (size_t i = 0; i < layout.places.size(); ++i) {
    const UnitPlace& place = layout.places[i];
    if (!place.direct) continue;
    const UnitShare mine = share_of(place.member, rank_);
    const at::Tensor gradient = std::exchange(reduction.direct[i], at::Tensor());
    ItemList items;
    items.add_run(run_of(reduction.sums, place.offset, mine.numel), mine.in_whole.offset,
                  mine.numel);
    items.unpack(run_of(gradient, 0, gradient.numel()), reduction.scale, accumulate);
  }
}

// `chunk` may be the sums themselves, which are scaled then.
void Unit::add_received(const Reduction& reduction, const at::Tensor& chunk,
                        bool accumulate) const {
  const UnitLayout& layout = reduction.layout;
  const bool in_place = chunk.is_same(reduction.sums);
  if (!in_place) {
    ItemList packed;
    packed.add_run(run_of(reduction.sums, 0, layout.packed), 0, layout.packed);
    packed.unpack(chunk, 1.0, accumulate);
  }
  ItemList direct;
  for (const UnitPlace& place : layout.places) {
    if (!place.direct) continue;
    const int64_t numel = share_of(place.member, rank_).numel;
    direct.add_run(run_of(reduction.sums, place.offset, numel), place.offset, numel);
  }
  if (!in_place || reduction.scale != 1.0) direct.unpack(chunk, reduction.scale, accumulate);
}

std::vector<at::Tensor> Unit::deliver(const UnitLayout& layout, const at::Tensor& sums,
                                      const std::vector<at::Tensor>& before) const {
  const at::NoGradGuard no_grad;
  FS_CHECK_VALUE(before.size() == layout.places.size(), "expects as many gradients as members");
  const auto count = static_cast<int64_t>(layout.places.size());
  const at::Tensor flags = run_of(sums, layout.flags, count).to(at::kCPU, at::kDouble);
  const double* used = flags.const_data_ptr<double>();
  std::vector<at::Tensor> results(layout.places.size());
  ItemList fresh;
  ItemList accumulated;
  for (size_t i = 0; i < layout.places.size(); ++i) {
    if (used[i] == 0.0) continue;
    const UnitPlace& place = layout.places[i];
    const UnitShare mine = share_of(place.member, rank_);
    const auto in_sums = compact(place.offset, mine.numel, mine.sizes);
    if (before[i].defined()) {
      accumulated.add(before[i], place.offset, in_sums);
    } else if (sums.scalar_type() == dtypes_.stored) {
      results[i] = ops::view_of(sums, in_sums, dtypes_.stored);
    } else {
      results[i] = ops::make_scratch(mine.sizes, dtypes_.stored, device_);
      fresh.add(results[i], place.offset, in_sums);
    }
  }
  fresh.unpack(sums, 1.0, false);
  accumulated.unpack(sums, 1.0, true);
  return results;
}

}  // namespace fastsync::engine
