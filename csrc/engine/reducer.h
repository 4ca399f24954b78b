// The reducer: autograd hooks in, averaged gradients out.
//
// One gradient's way: autograd accumulates it into `param.grad` and runs our post hook (no GIL);
// the hook marks its slot; the last slot of a bucket completes it; buckets are packed and launched
// strictly in plan order, so that every rank issues the same collectives in the same order whatever
// its own gradients do; autograd's final callbacks launch what is left, wait, and hand the averages
// over.
//
// [Note: the outermost backward]
// Reentrant checkpointing runs backwards inside a backward, each with final callbacks of its own.
// The step ends with the outermost one, so its callback is queued by a hook on the forward's
// outputs, which runs before any inner backward can start. Where a loss bypasses the outputs, the
// first gradient's hook queues it.
//
// [Note: where plans change]
// Ranks may differ in their forwards: in how many come under no_sync(), in one whose backward never
// comes. Only a synchronised step is common to all of them. So a new plan is made at the end of a
// step, in the callback `plan_due`, by every rank or by none: whether it is due follows from sums
// over ranks and from the number of steps alone.
//
// [Note: unfreezing]
// A parameter that is trained but not planned cannot wait for the end of the step: its gradient
// must be averaged in this very one. Unfreezing is taken to happen on all ranks before the same
// synchronising forward; Python checks that all come.
//
// [Note: recent plans]
// Two optimizers in one wrapper freeze and thaw two sets of parameters in turn (GANs). Each set has
// a plan, and the ranks go from one to the other with their buffers, once they have told each other
// through the rendezvous store that they all mean the same one.
//
// [Note: captured steps]
// A step that is captured into a CUDA graph runs this code once and its kernels many times. So
// nothing in it may wait for the device, and nothing may change with the steps: no vote is read or
// counted, the plan stays, no timeline is written.
//
// [Note: skipped steps]
// A rank whose forward or backward has failed may end its step without gradients: it takes part in
// the collectives that are left with zeros, as with unused parameters, and the averages reach it
// like any other. A bucket that it had sent before counts it. So each bucket is an average over
// ranks of its own, whose number is summed up after the last one; Python makes the averages those
// over so many ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../comm/chain.h"
#include "../comm/collective.h"
#include "../transport/shared_gradients.h"
#include "autograd_hooks.h"
#include "bucket.h"
#include "fault_watch.h"
#include "flags.h"
#include "forwards.h"
#include "plan_watch.h"
#include "precision.h"
#include "rate_meter.h"
#include "step_log.h"
#include "survival.h"
#include "usage.h"

namespace fastsync::engine {

struct ReducerOptions {
  bool skip_unused = false;     // buckets without a gradient are not sent: the same on every rank
  bool static_graph = false;    // learn how often each gradient arrives before overlapping
  bool fail_on_unused = false;  // find_unused_parameters=False was asked for
  bool check_finite = false;    // for NaN and infinity
  bool may_skip = false;        // see [Note: skipped steps]
};

// What Python has to do before a forward.
struct ForwardAdvice {
  bool regrouped = false;           // see [Note: unfreezing]: plan anew before this forward
  std::vector<std::string> unused;  // parameters to warn about, once
  bool paced = false;               // there is a pace() that is new
};

// Counters of this rank. Durations in seconds, sizes in bytes.
struct ReducerStats {
  int64_t steps = 0;                // synchronised backwards
  int64_t plans = 0;                // plans installed
  int64_t collectives = 0;          // buckets launched
  int64_t bytes = 0;                // bytes handed to collectives
  int64_t sent_bytes = 0;           // bytes that left this rank, where all-reduces are rings
  int64_t between_nodes_bytes = 0;  // those of them that left its node, in the hierarchical form
  int64_t residual_bytes = 0;       // memory that error feedback holds
  double exposed_seconds = 0;  // host time at the end of backward spent waiting for collectives
};

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  Reducer(const std::vector<at::Tensor>& params, const std::vector<std::string>& names,
          const std::string& group_name, ReducerOptions options,
          std::shared_ptr<Precision> precision = nullptr);
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Replaces the buckets. `specs` must cover each parameter that needs a gradient exactly once.
  // Another plan is due once the training has made `until` steps; -1: never for that reason.
  // `keep`: the plan that is replaced will be wanted again. See [Note: recent plans].
  void set_plan(const std::vector<BucketSpec>& specs, int64_t until = -1, bool keep = false);
  // Goes back to plan `number`, as sync_stats counts them; false where it is not kept any more.
  bool restore_plan(int64_t number);
  bool keeps_plan(int64_t number) const;
  // Kept plans do not fit any more: they travel over other routes or in another format.
  void forget_plans();

  // Called at the end of a step where a new plan is due. See [Note: where plans change].
  void on_plan_due(std::function<void()> fn);
  // After each synchronised step whose number in the training is a multiple of `steps`, with the
  // averages in place and nothing under way, the ranks compare what all of them should have. Where
  // they differ each calls `differ` with its replica_digests().
  void compare_every(int64_t steps, std::function<void(std::vector<int64_t>)> differ);
  // Of all parameters, then of the averages of the last step, by parameter; 0 where there is none
  // that all ranks have.
  std::vector<int64_t> replica_digests() const;

  // Start of a forward that will be differentiated, and synchronise. Throws what the previous
  // backward left to say. `captured`: see [Note: captured steps].
  ForwardAdvice prepare_forward(bool captured = false);
  // Start of a forward under no_sync(), whose number may differ between ranks.
  void prepare_local_forward();
  // End of such a forward. See [Note: which backwards synchronise].
  void prepare_backward(const std::vector<at::Tensor>& outputs, bool sync);
  // The next backward synchronises, whichever forward it belongs to. Throws what the previous one
  // left to say.
  ForwardAdvice announce_backward();
  // Whether a forward now is one of the running step again, within its backward: a checkpoint
  // recomputes it.
  bool recomputes() const;

  void set_static_graph();
  // Gradients are divided by this from now on (world size by default; fewer when ranks have
  // joined).
  void set_divisor(double divisor);
  // Takes part in one step of the other ranks without gradients of its own.
  void shadow_step();
  // Ends a step of this rank that has failed. See [Note: skipped steps].
  void skip_step();
  // Called at the end of a step that some ranks have skipped, with how many have not, by parameter;
  // -1: it is not trained.
  void on_skips(std::function<void(std::vector<int64_t>)> fn);
  // From now on a step that other ranks die in is finished by the survivors. See
  // reducer_elastic.cpp.
  void survive(Survivors survivors);
  // An optimizer has stepped: all ranks' have, or none.
  void note_optimizer();
  // Reduces the buckets of later plans with `hook` instead of averaging them. `flags_group`: a
  // process group for used flags alone; empty: there is none.
  void set_hook(std::unique_ptr<comm::Hook> hook, const std::string& flags_group);
  // Called once, at the end of the next synchronised backward.
  void at_end(std::function<void()> action);
  // Averages over another group from the next plan on, which must come at once.
  void use_group(const std::string& group_name);
  // Process groups for the links of coded buckets' chains, in order; see comm/worker.h. Needed
  // before a plan with coded buckets.
  void use_chains(std::vector<std::shared_ptr<comm::Collective>> links);
  // The process group over which regions travel: the same ranks. Needed before a plan with sharded
  // buckets.
  void use_shards(const std::string& group_name);
  // What the group's ranks share memory for, from the next plan on: sums of buckets, and regions of
  // sharded ones, in buffers of `pool`. Null: both travel through the group.
  void use_memory(std::shared_ptr<comm::Collective> sums, std::shared_ptr<comm::Collective> regions,
                  std::shared_ptr<ops::BufferPool> pool);
  // Looks out for other ranks' faults while it waits; null: no longer.
  void use_watch(std::shared_ptr<FaultWatch> watch);
  // Of the latest window of steps that all ranks have told of; nothing where nobody looks out, or
  // on devices.
  std::optional<PaceReport> pace() const;
  // Has this rank wait for others by `exchange`.
  void await_buffers(const std::function<void()>& exchange);
  void detach_hooks();

  // Of the parameters' gradients: see known_squares(). From now on buckets have squares summed up
  // on the way.
  std::optional<GradientSquares> squares(const std::vector<at::Tensor>& params,
                                         const ShardedUnits& units);

  // Each rank sends its region of `flat`, one of as many equal ones as there are ranks, to all.
  // Returns how many of these are under way, this one included: the regions of those before them
  // are there. All are after finish_gathers().
  int64_t start_gather(const at::Tensor& flat);
  void finish_gathers();

  // Parameter indices in the order of their gradients in the last synchronised step, missing ones
  // last.
  std::vector<int64_t> ready_order() const;
  std::vector<bool> trainable() const;
  ReducerStats stats() const;
  // Synchronised steps of the whole training, restarts included. Random numbers and schedules
  // follow them.
  int64_t steps() const { return earlier_steps_ + stats_.steps; }
  // Goes on where a training of so many steps was left.
  void resume(int64_t steps);
  StepReport last_step() const;
  // Bytes of gradients per second that the fastest bucket of the first step travelled at; 0 before.
  double wire_rate() const { return rate_.best(); }
  // Records when buckets are ready, packed, launched and done; nullptr: no longer.
  void set_timeline(std::shared_ptr<Timeline> timeline) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    log_.set_timeline(std::move(timeline));
  }
  // How many ranks used each parameter in the last synchronised step. Where no flags travel
  // (find_unused_parameters=False) this rank alone counts.
  std::vector<int64_t> used_counts() const;
  bool backward_running() const { return backward_running_; }
  // Parameters whose averages hold NaN or infinity, and whether what this rank gave for them did.
  // The parameters are the same on all ranks. Empty where nobody looks.
  std::vector<std::pair<int64_t, bool>> nonfinite() const;

  // Copies of what error feedback keeps back of each parameter, and the other way.
  Residuals residuals() const;
  void load_residuals(const Residuals& residuals);
  // Frees parked residuals of these parameters. See [Note: parked residuals].
  void drop_parked(const std::vector<int64_t>& params);

 private:
  // Enough to keep the network busy while the next one fills.

  struct Place {
    int64_t bucket = -1;
    size_t slot = 0;
  };
  struct Plan {
    std::vector<Bucket> buckets;
    std::vector<Place> places;  // by parameter
    int64_t until = -1;         // another plan is due after so many steps of the training
    int64_t number = 0;
    int64_t replaced = 0;  // the step at which it was kept
  };

  GradientHooks& hooks();
  void on_outputs_reached(ForwardPass& pass);
  void on_grad_ready(size_t param, bool defined);
  void place_gradient(size_t param);
  ForwardAdvice advise();
  void leave_backward(const char* task);
  void check_ended();
  void attach_thawed();
  void call_what_is_due();
  void compare();
  bool are_alike(int64_t digest);
  std::vector<at::Tensor> averages() const;
  void call(Phase phase, const std::function<void()>& fn);
  void check_covers(const Plan& plan) const;
  void install(Plan plan, bool keep);
  void forget_unused_plans();
  void check_capture() const;
  void check_repeated(size_t param, const Place& place) const;
  void begin_backward();
  void open_step();
  void withhold();
  void start_givers();
  std::vector<int64_t> await_givers();
  void advance();
  void launch(Bucket& bucket);
  void send(Bucket& bucket);
  void keep(const Bucket& bucket);
  bool may_take_early(const Bucket& bucket, size_t slot);
  bool is_broken() const;
  bool settle(std::unique_lock<std::recursive_mutex>& lock);
  void receive_all();
  void vote();
  bool meet(std::unique_lock<std::recursive_mutex>& lock);
  void average_again(std::unique_lock<std::recursive_mutex>& lock);
  void rebuild(std::unique_lock<std::recursive_mutex>& lock);
  void forget_own();
  void scale_alone();
  void make_room();
  void keep_unread(Bucket& bucket);
  void read_flags() const;
  std::vector<bool> read_missed();
  void restore_gradients(int64_t generation);
  void finish(size_t bucket, const std::vector<bool>& used);
  void await(size_t bucket);
  void begin_to_await(size_t bucket);
  bool arrives_within(size_t bucket, std::chrono::milliseconds time);
  bool comes_within(size_t bucket, std::chrono::milliseconds patience);
  [[noreturn]] void fail(size_t bucket, const char* what, const std::string& error);
  Wanted wanted(size_t bucket) const;
  double waited() const;
  void watch_over(const std::shared_ptr<comm::Collective>& ranks);
  void follow(std::function<Wanted()> what);
  void follow_step();
  void check_agreement();
  void await_region(comm::InFlight& gather);
  void await_last_issued(comm::InFlight& work, Phase phase, const std::string& place);
  bool is_running(int64_t generation) const {
    return backward_running_ && generation == generation_;
  }
  void end_backward_by(Ending ending, void (Reducer::*step)(int64_t));
  void close_backward(int64_t generation);
  void finish_backward(int64_t generation);
  Residuals residual_views() const;
  bool holds_residual(int64_t bucket) const;
  void close_buckets();
  void finish_buckets();
  void start_flags();
  bool idle(const Bucket& bucket, const std::function<bool(size_t)>& used) const;
  void end_step();
  void abandon();
  bool communicates() const { return routes_.communicate(); }
  Packing packing() const;
  bool votes() const { return !options_.fail_on_unused && routes_.group->size() > 1; }
  template <typename Fn>
  auto noting_errors(const Fn& fn);
  template <typename Fn>
  void or_abandon(const Fn& fn);
  template <typename Fn>
  void with_context(size_t bucket, const char* what, const Fn& fn);

  // Recursive: a communication hook runs under it and may ask the reducer something.
  mutable std::recursive_mutex mutex_;
  int64_t number_;
  ReducerOptions options_;
  Parameters params_;
  std::unique_ptr<GradientHooks> hooks_;
  std::shared_ptr<Precision>
      precision_;  // null: parameters compute in the dtype that they are stored in
  Routes routes_;
  std::deque<std::unique_ptr<comm::InFlight>> gathers_;  // of regions, under way
  std::vector<std::function<void()>> at_end_;
  std::function<void()> plan_due_;
  std::function<void(std::vector<int64_t>)> differ_;
  int64_t compared_every_ = 0;  // steps; 0: nothing is compared
  double divisor_ = 1.0;

  Plan plan_;
  std::map<int64_t, Plan> kept_plans_;  // by number
  Residuals parked_;                    // see [Note: parked residuals]
  std::vector<bool> planned_;           // parameters in the current plan

  Forwards forwards_;
  bool backward_running_ = false;
  bool captured_ = false;
  bool squares_ = false;         // somebody clips gradients by their norm
  bool skipping_ = false;        // this rank, the running step
  bool counting_fires_ = false;  // static graph, first step: nothing is launched before the end
  int64_t generation_ = 0;  // tells a final callback whether its backward is still the current one
  size_t next_ = 0;         // first bucket that has not been launched
  std::chrono::milliseconds patience_{5000};  // how long a bucket may wait for room

  PlanWatch watch_;
  UsageCheck usage_;
  StepLog log_;
  std::shared_ptr<FaultWatch> faults_;  // null: nobody looks out
  size_t watched_as_ = 0;
  std::shared_ptr<PaceBoard> board_;  // null: nobody learns of the ranks' pace
  FaultWatch::Clock::time_point waits_since_;
  std::pair<int64_t, size_t> waited_for_{-1, 0};  // step and bucket
  RateMeter rate_;
  std::unique_ptr<FlagExchange>
      flags_;  // null where flags travel with the gradients, or not at all
  std::unique_ptr<FlagExchange> givers_;  // of gradients; null before the first that may skip
  std::unique_ptr<FlagExchange> alike_;   // the bits of a digest; null before the first comparison
  std::vector<bool> gives_;               // by bucket; then whether an optimizer has stepped
  bool stepped_ = false;                  // an optimizer, since the last step
  std::function<void(std::vector<int64_t>)> on_skips_;
  std::unique_ptr<Survival> survival_;  // null: a death ends the training
  std::vector<int64_t> counts_;         // used_counts() of a step whose plan has gone; else empty
  mutable std::vector<UnreadFlags> unread_;  // in the order of the steps
  ReducerStats stats_;
  int64_t earlier_steps_ = 0;
};

}  // namespace fastsync::engine
