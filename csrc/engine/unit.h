// Parameters that ranks share, and that come and go together (ZeRO, stage 3).
//
// [Note: a unit's way]
// Each rank keeps a share of every member: an equal part along one of its dimensions, the last
// ranks' smaller where it is not divisible. Its shares lie side by side in one flat tensor, the
// shard:
//
//   | small members | large members |
//
// Before the unit computes, the ranks exchange their shards, and the whole members get memory;
// after that they lose it.
//
//   gather   shard  ->  messages  ->  whole members
//   reduce   gradients of whole members  ->  messages  ->  sum in the order of the ranks
//              ->  gradients of this rank's shares
//
// What is small travels in one message, which a kernel packs and another unpacks, and after it a
// flag per member that tells whether this rank used it. A large share is a message by itself, sent
// from where it lies and received where it belongs: no copy. Ranks of one machine read shares where
// the others have written them, and codes are read where they have come. So whole members get
// memory only when they are wanted there. Backends without messages of any size (NCCL) gather and
// reduce-scatter one flat buffer, where everything counts as small.
//
// A thread adds up what has come, while the backward goes on. Gradients of large members are kept
// until they have been sent, and this rank's part of them until its turn among the terms. Ranks of
// one machine have copied what they send before the backward goes on, and read the others' where it
// is: so gradients go at once there. The first rank begins its sums with its part, the second may
// do so too, as a + b is b + a, and the others copy theirs.
//
// A layout with codes has both travel as those: [Note: codes of units] in unit_codes.h.
//
// Autograd saves whole members by their storages: each member is one tensor for good, whose memory
// comes and goes (../ops/loan.h). Filling it again is no change that autograd notices.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "../comm/collective.h"
#include "../comm/worker.h"
#include "../ops/items.h"
#include "../ops/loan.h"
#include "item_list.h"
#include "unit_codes.h"
#include "unit_log.h"
#include "unit_member.h"

namespace fastsync::engine {

// What the units of a model have in common.
struct UnitLinks {
  // `mark`: of the pool, in bytes.
  UnitLinks(std::shared_ptr<comm::Collective> among, int64_t mark)
      : ranks(std::move(among)), pool(mark), peers(std::make_shared<UnitPeers>(ranks->rank())) {}

  // Frees what no unit uses, and no other rank reads.
  void trim() {
    trim_pool();
    ranks->trim();
  }
  // Frees what no unit uses, and keeps what is shared with other ranks: making that anew costs
  // most.
  void trim_pool() { pool.trim(); }

  std::shared_ptr<comm::Collective> ranks;
  comm::Worker adder;  // adds up what has come, so that gradients can go
  ops::BlockPool pool;
  std::shared_ptr<UnitPeers> peers;
};

// Where a member's share lies among those that travel together. fastsync/units/layout.py makes
// these numbers.
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
  // What travels, where that is codes. Nothing is direct then, and all elements that are coded come
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
  // `tag`: of its own among the units of `links`, and even.
  Unit(std::shared_ptr<UnitLinks> links, std::vector<UnitMember> members, UnitDTypes dtypes,
       at::Device device, int tag);
  // What is under way goes on without it.
  ~Unit();
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  void set_name(UnitName name);
  // A whole member. All calls return tensors of the same memory, or lack of it.
  at::Tensor whole(size_t member) const;
  // What this rank keeps: of the stored dtype, laid out as `layout` says.
  void set_shard(const at::Tensor& shard, UnitLayout layout);

  // Has the whole members filled. Collective, unless they are or will be.
  void start_gather();
  // Returns once they are.
  void finish_gather();
  // Gives them memory for somebody else to fill, where they have none: all of it, one-dimensional.
  at::Tensor lend();
  bool is_gathered() const { return whole_.has_memory() && !gathering_; }
  // Takes the whole members' memory away.
  void release();

  // Has the gradients of whole members reduced, by place of the layout; none stands for zeros.
  // Collective.
  void start_reduce(UnitLayout layout, std::vector<at::Tensor> gradients, double scale);
  // The sums over ranks of this rank's shares, as that layout says, times `scale`: of fp32, or
  // fp64.
  at::Tensor finish_reduce();
  // The shares of `sums` that any rank had a gradient for, in the stored dtype: those that `before`
  // has are added to it there, and returned, the others are new tensors. Where `sums` are, which
  // may have been copied to another device. `missed`: this rank had no gradient for some of them,
  // so that the flags are read, for which the host waits where they are on a device.
  std::vector<at::Tensor> deliver(const UnitLayout& layout, const at::Tensor& sums,
                                  const std::vector<at::Tensor>& before, bool missed) const;

 private:
  struct Reduction {
    UnitLayout layout;
    std::vector<at::Tensor> direct;  // gradients, by place; undefined where they were packed
    at::Tensor sent;
    at::Tensor received;  // chunks of the other ranks; the first lies in `sums` where that can be
    std::shared_ptr<comm::Incoming>
        lent;        // from other ranks, in their memory; nothing is received then
    at::Tensor own;  // this rank's chunk, where it waits for its turn
    at::Tensor sums;
    double scale = 1.0;
    std::unique_ptr<UnitCodes> codes;  // null where gradients travel as they are
    uint64_t step = 0;                 // among those that are coded
    std::unique_ptr<comm::InFlight> in_flight;
    std::shared_ptr<comm::Ticket> added;
    std::unique_ptr<Movement> movement;
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
  void add_shares(ItemList& items, int64_t begin, int rank, bool direct) const;
  at::Tensor ready_to_send(const at::Tensor& gradient, size_t member) const;
  void pack_gradients(Reduction& reduction, const std::vector<at::Tensor>& gradients) const;
  // What is sent of the shares of `rank` alone, in elements.
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
  void add_lent(Reduction& reduction) const;
  void add_own(Reduction& reduction, bool accumulate) const;
  void take_own(Reduction& reduction, const at::Tensor& to, double scale, bool accumulate) const;
  void add_received(const Reduction& reduction, const at::Tensor& chunk, bool accumulate) const;
  void add_part(const Reduction& reduction, const at::Tensor& part, bool accumulate) const;
  void add_packed(const Reduction& reduction, const at::Tensor& from, bool accumulate) const;
  void add_direct(const Reduction& reduction, const at::Tensor& from, bool side_by_side,
                  bool accumulate) const;
  // Of what travels as it is.
  int64_t bytes_leaving(Direction direction, const UnitLayout& layout) const;
  std::unique_ptr<Movement> begin(Direction direction, int64_t bytes) const;
  void add_up_when_there(const std::shared_ptr<Reduction>& reduction);
  static void await(Reduction& reduction);
  // Has nobody add up who might still wait: this unit may end before.
  static void abandon(Reduction& reduction);

  std::shared_ptr<UnitLinks> links_;
  std::shared_ptr<const UnitName> name_ = std::make_shared<const UnitName>();
  std::vector<UnitMember> members_;
  UnitDTypes dtypes_;
  at::Device device_;
  int tag_;
  int rank_;
  int ranks_;
  ops::Loan whole_;
  at::Tensor shard_;
  UnitLayout layout_;
  at::Tensor staging_;  // packed chunks of all ranks
  at::Tensor lowered_;  // the shard in the compute dtype, where that is another
  std::unique_ptr<comm::InFlight> gathering_;
  std::shared_ptr<comm::Incoming> borrowed_;   // all ranks' shares, while they are under way there
  std::unique_ptr<UnitCodes> gathered_codes_;  // while they are under way
  std::unique_ptr<Movement> gather_;
  std::shared_ptr<Reduction> reduction_;
  uint64_t coded_reductions_ = 0;
};

}  // namespace fastsync::engine
