#include "fsdp/param_group.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "check.h"
#include "ops/buffers.h"
#include "ops/ops.h"

namespace fastsync::engine {
namespace {

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

void Unit::set_name(UnitName name) {
  whole_.set_absence(
      "the parameters of " + name.words +
      " are needed while they are sharded: autograd reached them without passing what the forward "
      "of their module returned, or they are used outside of that forward. Return every tensor "
      "that the loss is made of from forward(); or keep the parameters with "
      "module.set_reshard_after_forward(False), and module.set_reshard_after_backward(False) for "
      "gradients of gradients; or call register_fsdp_forward_method(module, name) for other "
      "methods than forward()");
  name_ = std::make_shared<const UnitName>(std::move(name));
}

at::Tensor Unit::whole(size_t member) const {
  const UnitMember& its = members_.at(member);
  return ops::view_of(whole_.flat(), ops::compact(its.whole_offset, its.numel(), its.sizes),
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
  ops::ItemList items;
  add_shares(items, begin, rank, direct);
  items.unpack(flat, 1.0, false);
}

// All shares at once: launches do not grow with the ranks.
void Unit::fill_from_gathered() {
  allocate();
  ops::ItemList items;
  for (int r = 0; r < ranks_; ++r) add_shares(items, r * layout_.packed, r, /*direct=*/false);
  items.unpack(staging_, 1.0, false);
}

void Unit::fill_from_codes() {
  allocate();
  ops::ItemList items;
  for (int r = 0; r < ranks_; ++r)
    add_shares(items, r * gathered_codes_->chunk_numel(), r, /*direct=*/false);
  gathered_codes_->decode(items.items(), staging_);
  gathered_codes_.reset();
}

int64_t Unit::numel_side_by_side(const UnitLayout& layout, int rank) const {
  int64_t numel = layout.packed;
  for (const UnitPlace& place : layout.places) {
    if (place.direct) numel += share_of(place.member, rank).numel;
  }
  return numel;
}

// Starts a gather in which every rank reads the others' shares in shared memory. This rank reads
// its own share there, too: the original may change meanwhile. False if the ranks share no memory.
bool Unit::borrow_shares(const at::Tensor& source) {
  std::vector<comm::Expected> expected;
  std::vector<comm::Message> sent;
  for (int r = 0; r < ranks_; ++r) {
    expected.push_back({r, numel_side_by_side(layout_, r)});
    add_messages(sent, r, source);
  }
  borrowed_ = links_->ranks->borrow(expected, dtypes_.compute, sent, tag_);
  if (!borrowed_) return false;
  gathering_ = std::make_unique<comm::SharedInFlight>(borrowed_);
  links_->pool.give(std::exchange(lowered_, at::Tensor()));
  return true;
}

void Unit::fill_from_borrowed() {
  allocate();
  for (int r = 0; r < ranks_; ++r) {
    int64_t next = layout_.packed;
    ops::ItemList items;
    for (const UnitPlace& place : layout_.places) {
      const UnitShare share = share_of(place.member, r);
      const auto layout = moved(share.in_whole, members_[place.member].whole_offset);
      items.add(ops::view_of(whole_.flat(), layout, dtypes_.compute),
                place.direct ? next : place.offset, layout);
      if (place.direct) next += share.numel;
    }
    items.unpack(borrowed_->parts().at(static_cast<size_t>(r)), 1.0, false);
  }
  borrowed_->release();
  borrowed_.reset();
}

// The shares of `rank` in the whole members.
void Unit::add_shares(ops::ItemList& items, int64_t begin, int rank, bool direct) const {
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
  ops::ItemList items;
  items.add_run(shard_, 0, layout_.chunk);
  items.pack(lowered_, 1.0);
  return lowered_;
}

at::Tensor Unit::allocate() {
  const at::NoGradGuard no_grad;
  const int64_t numel = whole_.flat().numel();
  if (!whole_.has_memory()) whole_.acquire(links_->pool.take(numel, dtypes_.compute, device_));
  return ops::run_of(whole_.flat(), 0, numel);
}

void Unit::start_coded_gather() {
  gathered_codes_ = std::make_unique<UnitCodes>(*layout_.codes, links_->ranks, device_, tag_);
  staging_ = links_->pool.take(gathered_codes_->bytes(), at::kByte, device_);
  gather_ = begin(Direction::kGather, gathered_codes_->sent_bytes());
  gathering_ = gathered_codes_->gather(shard_, staging_);
  tell_when_gathered();
}

void Unit::tell_when_gathered() {
  if (auto done = gather_->on_done()) gathering_->on_done(std::move(done));
}

void Unit::start_gather() {
  if (whole_.has_memory() || gathering_) return;
  FS_CHECK(shard_.defined(), "a unit is gathered before it has any parameters");
  const at::NoGradGuard no_grad;
  try {
    begin_gather();
  } catch (...) {
    // Unfilled memory must not be mistaken for parameters.
    forget_gather();
    throw;
  }
}

// Forgets the gather and returns its memory: the backend may still write there, so the memory is
// not reused.
std::vector<at::Tensor> Unit::forget_gather() {
  gathered_codes_.reset();
  borrowed_.reset();
  return {std::exchange(staging_, {}), std::exchange(lowered_, {}), whole_.take_back()};
}

void Unit::begin_gather() {
  if (layout_.codes) return start_coded_gather();
  if (ranks_ == 1) {
    allocate();
    return fill_from(shard_, 0, rank_, /*direct=*/true);
  }
  gather_ = begin(Direction::kGather, bytes_leaving(Direction::kGather, layout_));
  const at::Tensor source = source_of_gather();
  if (!by_messages()) {
    staging_ = links_->pool.take(ranks_ * layout_.packed, dtypes_.compute, device_);
    gathering_ = links_->ranks->all_gather(staging_, source);
  } else if (!borrow_shares(source)) {
    allocate();
    fill_from(shard_, 0, rank_, /*direct=*/true);
    staging_ = links_->pool.take(ranks_ * layout_.packed, dtypes_.compute, device_);
    exchange_shares(source);
  }
  tell_when_gathered();
}

// Adds the messages with this rank's shares for `rank`.
void Unit::add_messages(std::vector<comm::Message>& sent, int rank,
                        const at::Tensor& source) const {
  const auto post = [&](int64_t begin, int64_t numel) {
    if (numel > 0) sent.push_back({rank, ops::run_of(source, begin, numel)});
  };
  post(0, layout_.packed);
  for (const UnitPlace& place : layout_.places) {
    if (place.direct) post(place.offset, share_of(place.member, rank_).numel);
  }
}

void Unit::exchange_shares(const at::Tensor& source) {
  std::vector<comm::Message> received;
  std::vector<comm::Message> sent;
  for (int r = 0; r < ranks_; ++r) {
    if (r == rank_) continue;
    const auto expect = [&](const at::Tensor& flat, int64_t begin, int64_t numel) {
      if (numel > 0) received.push_back({r, ops::run_of(flat, begin, numel)});
    };
    expect(staging_, r * layout_.packed, layout_.packed);
    for (const UnitPlace& place : layout_.places) {
      const UnitShare theirs = share_of(place.member, r);
      const int64_t begin = members_[place.member].whole_offset + theirs.in_whole.offset;
      if (place.direct) expect(whole_.flat(), begin, theirs.numel);
    }
    add_messages(sent, r, source);
  }
  gathering_ = links_->ranks->exchange(std::move(received), std::move(sent), tag_);
}

void Unit::finish_gather() {
  if (!gathering_) return;
  const at::NoGradGuard no_grad;
  const auto work = std::move(gathering_);
  const Transfer::Arrives arrives = [&work](auto time) { return work->is_done_within(time); };
  try {
    gather_->await(work->can_be_asked() ? arrives : nullptr, [&work] { work->wait(); });
  } catch (...) {
    work->on_done([kept = forget_gather()] {});
    throw;
  }
  if (borrowed_) {
    fill_from_borrowed();
  } else if (gathered_codes_) {
    fill_from_codes();
  } else if (by_messages()) {
    for (int r = 0; r < ranks_; ++r) {
      if (r != rank_) fill_from(staging_, r * layout_.packed, r, /*direct=*/false);
    }
  } else {
    fill_from_gathered();
  }
  links_->pool.give(std::exchange(staging_, at::Tensor()));
  links_->pool.give(std::exchange(lowered_, at::Tensor()));
  gather_->arrived();
}

void Unit::release() {
  finish_gather();
  links_->pool.give(whole_.take_back());
}

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

std::unique_ptr<Transfer> Unit::begin(Direction direction, int64_t bytes) const {
  return std::make_unique<Transfer>(links_->peers, name_, direction, bytes);
}

}  // namespace fastsync::engine
