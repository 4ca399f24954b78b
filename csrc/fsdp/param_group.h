// A group of parameters that are sharded over the ranks, and gathered and freed together (ZeRO,
// stage 3).
//
// [Note: a unit's way]
// Each rank keeps a share of every member: an equal part along one of its dimensions; the parts of
// the last ranks are smaller if the dimension is not divisible. A rank's shares lie side by side in
// one flat tensor, the shard:
//
//   | small members | large members |
//
// Before the unit computes, the ranks exchange their shards, and the whole members get memory;
// afterwards they lose it.
//
//   gather   shard  ->  messages  ->  whole members
//   reduce   gradients of whole members  ->  messages  ->  sum in the order of the ranks
//              ->  gradients of this rank's shares
//
// Small members travel in one message, which one kernel packs and another unpacks, followed by a
// flag per member: whether this rank used it. A large share is a message of its own, sent from
// where it lies and received where it belongs, without a copy. Ranks of one machine read the
// others' shares in shared memory, and codes are decoded from the receive buffer; in both cases
// whole members get memory only when they are needed. Backends without messages of any size (NCCL)
// gather and reduce-scatter one flat buffer, in which every member counts as small.
//
// A thread adds up the received gradients while the backward goes on. Gradients of large members
// are kept until they have been sent, and this rank's part of them until its turn among the terms.
// Ranks of one machine copy the parts that they send before the backward goes on, and read the
// others' in place, so their gradients are freed at once. The first rank begins its sums with its
// own part; so may the second, as a + b is b + a; the others copy theirs.
//
// With codes in the layout, both travel coded: [Note: codes of units] in group_codes.h.
//
// Autograd saves whole members by their storages: each member is one permanent tensor, whose memory
// comes and goes (../ops/resizable_storage.h). Autograd does not notice that it is filled again.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "comm/collective.h"
#include "comm/worker.h"
#include "fsdp/group_codes.h"
#include "fsdp/group_log.h"
#include "ops/ops.h"
#include "ops/resizable_storage.h"

namespace fastsync::engine {

// The elements of a member that a rank holds.
struct UnitShare {
  ops::SlotLayout in_whole;  // of the member by itself
  std::vector<int64_t> sizes;
  int64_t numel = 0;
};

// A parameter that is sharded over the ranks.
struct UnitMember {
  std::vector<int64_t> sizes;
  int64_t dim = 0;           // along which it is cut
  int64_t whole_offset = 0;  // of its elements, among those of all whole members

  int64_t numel() const { return product(0, sizes.size()); }

  UnitShare share(int rank, int ranks) const {
    const auto along = static_cast<size_t>(dim);
    const int64_t length = sizes[along];
    const int64_t each = (length + ranks - 1) / ranks;
    const int64_t begin = std::min(length, rank * each);
    const int64_t count = std::min(each, length - begin);
    const int64_t outer = product(0, along);
    const int64_t inner = product(along + 1, sizes.size());
    UnitShare share;
    share.numel = outer * count * inner;
    share.sizes = sizes;
    share.sizes[along] = count;
    share.in_whole = {
        begin * inner, share.numel, {outer, count, inner}, {length * inner, inner, 1}};
    return share;
  }

 private:
  int64_t product(size_t begin, size_t end) const {
    int64_t result = 1;
    for (size_t i = begin; i < end; ++i) result *= sizes[i];
    return result;
  }
};

// State that the units of a model share.
struct UnitLinks {
  // `mark`: of the pool, in bytes; see ops::BlockPool.
  UnitLinks(std::shared_ptr<comm::Collective> among, int64_t mark)
      : ranks(std::move(among)), pool(mark), peers(std::make_shared<UnitPeers>(ranks->rank())) {}

  // Frees memory that no unit uses and no other rank reads.
  void trim() {
    pool.trim();
    ranks->trim();
  }

  std::shared_ptr<comm::Collective> ranks;
  comm::Worker adder;  // adds up received gradients, so that their memory is freed
  ops::BlockPool pool;
  std::shared_ptr<UnitPeers> peers;
};

// The place of a member's share among those that travel together. fastsync/fsdp/shard_layout.py
// computes these numbers.
struct UnitPlace {
  size_t member = 0;
  int64_t offset = 0;   // in a rank's chunk
  bool direct = false;  // a message by itself
};

struct UnitLayout {
  std::vector<UnitPlace> places;
  int64_t chunk = 0;   // elements for each rank
  int64_t packed = 0;  // of these, in the first message
  int64_t flags = -1;  // where the flags begin, one per place; -1: there are none
  // The codes that travel, if there are any. Then nothing is direct, and all coded elements come
  // before the flags.
  std::optional<CodedSpec> codes;
};

struct UnitDTypes {
  at::ScalarType stored = at::kFloat;
  at::ScalarType compute = at::kFloat;
  at::ScalarType reduce = at::kFloat;
};

class Unit {
 public:
  // `tag`: even, and unique among the units of `links`.
  Unit(std::shared_ptr<UnitLinks> links, std::vector<UnitMember> members, UnitDTypes dtypes,
       at::Device device, int tag);
  // Collectives in flight go on without the unit.
  ~Unit();
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  void set_name(UnitName name);
  // Returns a whole member. All calls return tensors over the same memory, or lack of it.
  at::Tensor whole(size_t member) const;
  // Sets this rank's shard: of the stored dtype, laid out as `layout` says.
  void set_shard(const at::Tensor& shard, UnitLayout layout);

  // Starts to fill the whole members. Collective, unless they are filled or under way.
  void start_gather();
  // Returns once they are filled.
  void finish_gather();
  // Gives the whole members memory for the caller to fill, if they have none. Returns all of it,
  // one-dimensional.
  at::Tensor allocate();
  bool is_gathered() const { return whole_.has_memory() && !gathering_; }
  // Frees the whole members' memory.
  void release();

  // Starts to reduce the gradients of whole members, given by place of the layout; an undefined one
  // counts as zeros. Collective.
  void start_reduce(UnitLayout layout, std::vector<at::Tensor> gradients, ops::Scale scale);
  // Returns the sums over ranks for this rank's shares, as that layout says, times `scale`: fp32 or
  // fp64.
  at::Tensor finish_reduce();
  // Returns the shares of `sums` for which any rank had a gradient, in the stored dtype: added to
  // the tensor in `before` if there is one, else as new tensors. They lie on the device of `sums`,
  // which may have been copied to another one. `missed`: this rank had no gradient for some of
  // them, so the flags are read; the host waits for them if they are on a device.
  std::vector<at::Tensor> deliver(const UnitLayout& layout, const at::Tensor& sums,
                                  const std::vector<at::Tensor>& before, bool missed) const;

 private:
  struct Reduction {
    UnitLayout layout;
    std::vector<at::Tensor> direct;  // gradients, by place; undefined where they were packed
    at::Tensor sent;
    at::Tensor received;  // chunks of the other ranks; the first lies in `sums` where that can be
    std::shared_ptr<comm::Incoming>
        in_place;    // from other ranks, in their memory; nothing is received then
    at::Tensor own;  // this rank's chunk, where it waits for its turn
    at::Tensor sums;
    ops::Scale scale;
    std::unique_ptr<UnitCodes> codes;  // null where gradients travel as they are
    uint64_t step = 0;                 // among those that are coded
    std::unique_ptr<comm::InFlight> in_flight;
    std::shared_ptr<comm::Ticket> added;
    std::unique_ptr<Transfer> transfer;
    std::mutex mutex;  // held while `added` adds up
    bool abandoned = false;
  };

  UnitShare share_of(size_t member, int rank) const {
    return members_.at(member).share(rank, ranks_);
  }
  bool by_messages() const { return links_->ranks->has_messages(device_); }
  at::Tensor source_of_gather();
  void begin_gather();
  void start_coded_gather();
  std::vector<at::Tensor> forget_gather();
  void fill_from(const at::Tensor& flat, int64_t begin, int rank, bool direct);
  void fill_from_gathered();
  void fill_from_codes();
  void add_messages(std::vector<comm::Message>& sent, int rank, const at::Tensor& source) const;
  bool borrow_shares(const at::Tensor& source);
  void fill_from_borrowed();
  void exchange_shares(const at::Tensor& source);
  void tell_when_gathered();
  void add_shares(ops::ItemList& items, int64_t begin, int rank, bool direct) const;
  at::Tensor ready_to_send(const at::Tensor& gradient, size_t member) const;
  void pack_gradients(Reduction& reduction, const std::vector<at::Tensor>& gradients) const;
  // Returns the elements in the message with the shares of `rank` alone.
  int64_t numel_side_by_side(const UnitLayout& layout, int rank) const;
  std::vector<comm::Message> to_others(const Reduction& reduction) const;
  void send_gradients(Reduction& reduction);
  void receive_gradients(Reduction& reduction);
  void keep_own(Reduction& reduction);
  at::Tensor room_to_send(Reduction& reduction);
  void send(Reduction& reduction);
  bool first_in_sums() const;
  at::Tensor chunk_from(const Reduction& reduction, int rank) const;
  void add_up(Reduction& reduction) const;
  void add_codes(const Reduction& reduction) const;
  void add_in_place(Reduction& reduction) const;
  void add_own(Reduction& reduction, bool accumulate) const;
  void take_own(Reduction& reduction, const at::Tensor& to, const ops::Scale& scale,
                bool accumulate) const;
  void add_received(const Reduction& reduction, const at::Tensor& chunk, bool accumulate) const;
  void add_part(const Reduction& reduction, const at::Tensor& part, bool accumulate) const;
  void add_packed(const Reduction& reduction, const at::Tensor& from, bool accumulate) const;
  void add_direct(const Reduction& reduction, const at::Tensor& from, bool side_by_side,
                  bool accumulate) const;
  // Returns the bytes that leave this rank if nothing is coded.
  int64_t bytes_leaving(Direction direction, const UnitLayout& layout) const;
  std::unique_ptr<Transfer> begin(Direction direction, int64_t bytes) const;
  void add_up_when_there(const std::shared_ptr<Reduction>& reduction);
  static void await(Reduction& reduction);
  // Keeps a thread that still waits from adding up: this unit may be gone by then.
  static void abandon(Reduction& reduction);

  std::shared_ptr<UnitLinks> links_;
  std::shared_ptr<const UnitName> name_ = std::make_shared<const UnitName>();
  std::vector<UnitMember> members_;
  UnitDTypes dtypes_;
  at::Device device_;
  int tag_;
  int rank_;
  int ranks_;
  ops::ResizableStorage whole_;
  at::Tensor shard_;
  UnitLayout layout_;
  at::Tensor staging_;  // packed chunks of all ranks
  at::Tensor lowered_;  // the shard in the compute dtype, where that is another
  std::unique_ptr<comm::InFlight> gathering_;
  std::shared_ptr<comm::Incoming> borrowed_;   // all ranks' shares, while they are in flight there
  std::unique_ptr<UnitCodes> gathered_codes_;  // while they are in flight
  std::unique_ptr<Transfer> gather_;
  std::shared_ptr<Reduction> reduction_;
  uint64_t coded_reductions_ = 0;
};

}  // namespace fastsync::engine
