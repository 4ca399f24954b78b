// The reducer: autograd hooks in, averaged gradients out.
//
// The path of a gradient: autograd accumulates it into `param.grad` and runs our post hook (no
// GIL); the hook marks its slot; the last slot of a bucket completes it; buckets are packed and
// launched strictly in plan order, so that every rank issues the same collectives in the same
// order, whatever the order of its own gradients; autograd's final callbacks launch the remaining
// buckets, wait, and deliver the averages.
//
// [Note: the outermost backward]
// Reentrant checkpointing runs backwards inside a backward, each with final callbacks of its own.
// The step ends with the outermost backward, so a hook on the forward's outputs queues its
// callback; that hook runs before any inner backward can start. If a loss bypasses the outputs, the
// hook of the first gradient queues the callback.
//
// [Note: where plans change]
// Ranks may differ in their forwards: in the number of forwards under no_sync(), or in a forward
// without a backward. Only a synchronised step is common to all ranks. So every rank makes a new
// plan at the end of a step, in the callback `plan_due`, or no rank does: whether a plan is due
// follows from sums over ranks and from the number of steps alone.
//
// [Note: unfreezing]
// A parameter that is trained but not planned cannot wait for the end of the step: its gradient
// must be averaged in this very step. All ranks are expected to unfreeze before the same
// synchronising forward; Python checks that they do.
//
// [Note: recent plans]
// Two optimizers in one wrapper freeze and unfreeze two sets of parameters in turn (GANs). Each set
// has a plan. The ranks switch between the plans, which keep their buffers, once they have agreed
// through the rendezvous store that all mean the same plan.
//
// [Note: captured steps]
// A step that is captured into a CUDA graph runs this code once and its kernels many times. So
// nothing in it may wait for the device, and nothing may change from step to step: no vote is read
// or counted, the plan stays, no timeline is written.
//
// [Note: skipped steps]
// A rank whose forward or backward has failed may end its step without gradients: it joins the
// remaining collectives with zeros, as for unused parameters, and receives the averages like any
// other rank. A bucket that it sent before the failure includes its gradients. So the number of
// contributors differs between buckets. It is summed up after the last bucket, and Python rescales
// the averages to it.
//
// [Note: groups]
// Parameters may be averaged over other ranks than the rest, as experts are over the ranks that
// hold the same ones. All ranks of the process group have one plan, and a bucket of it says which
// group averages it. Buckets of all groups are launched and awaited in the order of that plan, so
// that no two ranks wait for each other in different groups. Votes travel in the buckets of group
// 0, the process group itself, alone: their sums are the same on all ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <atomic>
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
#include <variant>
#include <vector>

#include "comm/collective.h"
#include "comm/pipeline.h"
#include "fault/fault_watch.h"
#include "reducer/autograd_hooks.h"
#include "reducer/bucket.h"
#include "reducer/flags.h"
#include "reducer/forwards.h"
#include "reducer/plan_watch.h"
#include "reducer/precision.h"
#include "reducer/step_log.h"
#include "reducer/survival.h"
#include "reducer/usage.h"

namespace fastsync::engine {

// Tasks for Python before a forward.
struct ForwardAdvice {
  bool regrouped = false;           // see [Note: unfreezing]: plan anew before this forward
  std::vector<std::string> unused;  // parameters to warn about, once
  bool new_timing = false;          // step_timing() has changed
};

// Calls to Python, once in a backward or a step, for the weights of micro-batches, the means of
// groups and DTensors. See mean_weights.py, group_means.py and local_gradients.py.
struct Weighing {
  // A backward has reached outputs, and has not accumulated anything. The argument: earlier ones
  // have, since the last synchronised step. Returns the parameters whose gradients hold the last
  // mean: these count as used, since a part of it is left to each rank.
  std::function<std::vector<size_t>(bool)> begin_backward;
  // A synchronised step begins, with so many backwards since the last one. Returns parameters as
  // begin_backward does.
  std::function<std::vector<size_t>(int64_t)> start;
  // Returns the factor of the step's gradients. May wait for other ranks.
  std::function<std::variant<double, at::Tensor>()> scale;
};

// Ranks that have the same parameters: all of them, and each part of the ranks that has a group of
// parameters of its own.
struct ReplicaSets {
  std::vector<int64_t> ranks;  // how many are in each set
  std::vector<size_t> of;      // by parameter, the set that has what this rank has
};

// Counters of this rank. Durations in seconds, sizes in bytes.
struct ReducerStats {
  int64_t steps = 0;                // synchronised backwards
  int64_t plans = 0;                // plans installed
  int64_t collectives = 0;          // buckets launched
  int64_t bytes = 0;                // bytes handed to collectives
  int64_t sent_bytes = 0;           // bytes that left this rank, if all-reduces are rings
  int64_t between_nodes_bytes = 0;  // those that left its node, in the hierarchical form
  int64_t residual_bytes = 0;       // memory that error feedback holds
  double exposed_seconds = 0;  // host time at the end of backward spent waiting for collectives
};

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  Reducer(const std::vector<at::Tensor>& params, const std::vector<std::string>& names,
          const std::string& group_name, ReducerOptions options,
          std::shared_ptr<Precision> precision = nullptr,
          const std::vector<at::Tensor>& leaves = {});
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Replaces the buckets. `specs` must cover each parameter that needs a gradient exactly once.
  // Another plan is due once the training has made `until` steps; -1: never for that reason.
  // `keep`: the replaced plan will be needed again. See [Note: recent plans].
  void set_plan(const std::vector<BucketSpec>& specs, int64_t until = -1, bool keep = false);
  // Goes back to plan `number`, as sync_stats counts them; false if that plan is no longer kept.
  bool restore_plan(int64_t number);
  bool keeps_plan(int64_t number) const;
  // Drops the kept plans: their routes or formats no longer fit.
  void forget_plans();

  // Sets the callback for the end of a step after which a new plan is due. See
  // [Note: where plans change].
  void on_plan_due(std::function<void()> fn);
  // After each synchronised step whose number in the training is a multiple of `steps`, with the
  // averages in place and nothing under way, the ranks compare their parameters and averages. If
  // these differ, each rank calls `differ` with its replica_digests().
  void compare_every(int64_t steps, std::function<void(std::vector<int64_t>)> differ,
                     ReplicaSets sets);
  // Returns digests of all parameters, then of the averages of the last step, by parameter; 0 if
  // not all ranks have that average.
  std::vector<int64_t> replica_digests() const;
  // Returns the parameters into whose gradients a backward has accumulated since the last step of
  // this reducer, so that they hold something that nobody has averaged.
  std::vector<int64_t> accumulated() const;
  // Returns the planned parameters of which that is not so; none before the first step.
  std::vector<int64_t> averaged() const;

  // Starts a forward whose backward will synchronise. Throws the complaint of the previous
  // backward, if there is one. `captured`: see [Note: captured steps].
  ForwardAdvice prepare_forward(bool captured = false);
  // Starts a forward under no_sync(). The number of these may differ between ranks.
  void prepare_local_forward();
  // Ends a forward. See [Note: which backwards synchronise].
  void prepare_backward(const std::vector<at::Tensor>& outputs, bool sync);
  // Makes the next backward synchronise, whichever forward it belongs to. Throws the complaint of
  // the previous one, if there is one.
  ForwardAdvice announce_backward();
  // Whether a forward now would run within the backward of the running step: an activation
  // checkpoint recomputes it.
  bool recomputes() const;

  void set_static_graph();
  // Sets the divisor of gradients (world size by default; less when ranks have joined).
  void set_divisor(double divisor);
  // Adds the next of the groups of later plans. See [Note: groups].
  void add_group(const std::string& group_name, double divisor);
  // Gradients are scaled as `weighing` says, whatever the divisor.
  void use_weights(Weighing weighing);
  // Takes part in one step of the other ranks without gradients of its own.
  void shadow_step();
  // Ends a step of this rank that has failed. See [Note: skipped steps].
  void skip_step();
  // Sets the callback for the end of a step that some ranks have skipped. It gets the number of
  // ranks that have not, by parameter; -1: not trained.
  void on_skips(std::function<void(std::vector<int64_t>)> fn);
  // From now on the survivors finish a step in which other ranks die. See survival.h.
  void survive(Survivors survivors);
  // Notes that an optimizer has stepped. Either the optimizers of all ranks have, or none.
  void note_optimizer();
  // Reduces the buckets of later plans with `hook` instead of averaging them. `flags_group`: a
  // process group for used flags alone; empty: none.
  void set_hook(comm::Hook hook, const std::string& flags_group);
  // Calls `action` once, at the end of the next synchronised backward.
  void at_end(std::function<void()> action);
  // Averages over another group from the next plan on; the caller must install that plan at once.
  void use_group(const std::string& group_name);
  // Sets the process groups for the stages of a group's coded buckets' pipelines, in order; see
  // comm/worker.h. Needed before a plan with coded buckets.
  void use_pipelines(std::vector<std::shared_ptr<comm::Collective>> stages, size_t group = 0);
  // Sets the process group over which regions travel, of the same ranks. Needed before a plan with
  // sharded buckets.
  void use_shards(const std::string& group_name);
  // From the next plan on, sums of buckets and regions of sharded ones travel through memory that
  // the ranks of a group share, in buffers of `pool`. Null: both travel through the group.
  void use_memory(std::shared_ptr<comm::Collective> sums, std::shared_ptr<comm::Collective> regions,
                  std::shared_ptr<ops::BufferPool> pool, size_t group = 0);
  // Watches for faults of other ranks while it waits; null: no longer. `ranks`: those of this
  // reducer, as the watch counts them, where it watches more.
  void use_watch(std::shared_ptr<FaultWatch> watch, std::vector<int64_t> ranks);
  // Returns the step timing of the latest window that all ranks have reported; nothing without a
  // watch, or on devices.
  std::optional<StepTimingReport> step_timing() const;
  // Returns the seconds so far in which this rank waited for no other, up to a change of activity.
  double busy_seconds() const;
  // Runs `exchange`, in which this rank waits for others, and counts its time as waiting.
  void await_buffers(const std::function<void()>& exchange);
  void detach_hooks();

  // Returns squares of the parameters' gradients: see known_squares(). From now on buckets sum up
  // squares on the way.
  std::optional<GradientSquares> squares(const std::vector<at::Tensor>& params,
                                         const ShardedUnits& units);

  // Starts an all-gather of `flat`, which has one region per rank, all of equal size. Returns how
  // many gathers are in flight, this one included; earlier ones have arrived. finish_gathers()
  // waits for all.
  int64_t start_gather(const at::Tensor& flat);
  void finish_gathers();

  // Returns parameter indices in the order of their gradients in the last synchronised step,
  // missing ones last.
  std::vector<int64_t> ready_order() const;
  std::vector<bool> trainable() const;
  ReducerStats stats() const;
  // Returns the synchronised steps of the whole training, restarts included. Random numbers and
  // schedules follow them.
  int64_t steps() const { return earlier_steps_ + stats_.steps; }
  // Continues a training that has made `steps` steps.
  void resume(int64_t steps);
  StepReport last_step() const;
  // Returns the bytes of gradients per second of the fastest bucket of the first step; 0 before.
  double wire_rate() const { return rate_->load(); }
  // Records when buckets are ready, packed, launched and done; nullptr: no longer.
  void set_timeline(std::shared_ptr<Timeline> timeline) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    log_.set_timeline(std::move(timeline));
  }
  // Returns how many ranks used each parameter in the last synchronised step. If no flags travel
  // (find_unused_parameters=False), only this rank counts.
  std::vector<int64_t> used_counts() const;
  bool backward_running() const { return backward_running_; }
  // Returns the parameters whose averages hold NaN or infinity, and whether this rank's gradients
  // for them did. The parameters are the same on all ranks. Empty if gradients are not checked.
  std::vector<std::pair<int64_t, bool>> nonfinite() const;

  // Returns copies of the error-feedback residuals of each parameter, or loads them.
  Residuals residuals() const;
  void load_residuals(const Residuals& residuals);
  // Frees parked residuals of these parameters. See [Note: parked residuals].
  void drop_parked(const std::vector<int64_t>& params);

 private:
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
  bool backward_failed() const { return backward_running_ && running_.expired(); }
  void forget_failed_backward();
  void check_ended();
  void attach_thawed();
  void call_what_is_due();
  void compare();
  bool are_alike(const std::vector<int64_t>& digests);
  std::vector<at::Tensor> averages() const;
  void call(Phase phase, const std::function<void()>& fn);
  void check_covers(const Plan& plan) const;
  void install(Plan plan, bool keep);
  void forget_unused_plans();
  void check_capture() const;
  void check_repeated(size_t param, const Place& place) const;
  void note_backward();
  void use_parts(const std::vector<size_t>& params);
  void begin_backward();
  void open_step();
  void withhold();
  FlagExchange& exchange_in(std::unique_ptr<FlagExchange>& kept) const;
  void drop_exchanges();
  void start_contributors();
  std::vector<int64_t> await_contributors();
  void advance();
  void launch(Bucket& bucket);
  void send(Bucket& bucket);
  void keep(const Bucket& bucket);
  bool may_take_early(const Bucket& bucket, size_t slot);
  bool is_broken() const;
  bool agree_on_averages(std::unique_lock<std::recursive_mutex>& lock);
  void receive_all();
  void vote();
  bool meet(std::unique_lock<std::recursive_mutex>& lock);
  void average_again(std::unique_lock<std::recursive_mutex>& lock);
  void rebuild(std::unique_lock<std::recursive_mutex>& lock);
  void forget_own();
  void scale_alone();
  void weigh();
  void wait_for_scale() const;
  void make_room();
  void keep_unread(Bucket& bucket);
  void read_flags() const;
  std::vector<bool> read_missed();
  void finish(size_t bucket, const std::vector<bool>& used);
  void await(size_t bucket);
  void begin_to_await(size_t bucket);
  bool arrives_within(size_t bucket, std::chrono::milliseconds time);
  bool comes_within(size_t bucket, std::chrono::milliseconds timeout);
  [[noreturn]] void fail(size_t bucket, const char* what, const std::string& error);
  ExpectedCollective expected(size_t bucket) const;
  double waited() const;
  void watch_over(const std::shared_ptr<comm::Collective>& ranks);
  void follow(std::function<ExpectedCollective()> what);
  void follow_step();
  void check_agreement();
  void await_region(comm::InFlight& gather);
  void await_last_issued(comm::InFlight& work, Phase phase, const std::string& label);
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
  Packing packing(size_t group = 0) const;
  Routes& routes(size_t group) { return group == 0 ? routes_ : groups_.at(group - 1); }
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
  // Null: parameters are used in their storage dtype.
  std::shared_ptr<Precision> precision_;
  Routes routes_;
  std::vector<Routes> groups_;                           // from 1 on
  std::deque<std::unique_ptr<comm::InFlight>> gathers_;  // of regions, under way
  std::vector<std::function<void()>> at_end_;
  std::function<void()> plan_due_;
  std::function<void(std::vector<int64_t>)> differ_;
  int64_t compared_every_ = 0;  // steps; 0: nothing is compared
  ReplicaSets replicas_;
  std::vector<double> divisors_;          // by group
  Weighing weighing_;                     // empty without weights
  bool weighed_ = false;                  // the scale of the running step is known
  ops::Scale scale_;                      // by weights
  std::optional<c10::Stream> scaled_on_;  // the stream that computes it; null on CPUs
  int64_t backwards_ = 0;    // that have reached outputs since the last synchronised step
  int known_backward_ = -1;  // the last of them

  Plan plan_;
  std::map<int64_t, Plan> kept_plans_;  // by number
  Residuals parked_;                    // see [Note: parked residuals]
  std::vector<bool> planned_;           // parameters in the current plan

  Forwards forwards_;
  uint64_t first_node_ = 0;  // of autograd's graph of the last forward
  bool backward_running_ = false;
  std::weak_ptr<void> running_;  // expires when autograd leaves the backward
  bool captured_ = false;
  bool squares_ = false;   // the script clips gradients by their norm
  bool skipping_ = false;  // this rank, the running step
  bool counting_accumulations_ =
      false;                // static graph, first step: nothing is launched before the end
  int64_t generation_ = 0;  // shows a final callback whether its backward is still the current one
  size_t next_ = 0;         // first bucket that has not been launched
  std::chrono::milliseconds timeout_{5000};  // how long a bucket may wait for room

  PlanWatch watch_;
  UsageCheck usage_;
  StepLog log_;
  std::shared_ptr<FaultWatch> faults_;  // null: no watch
  size_t watched_as_ = 0;
  std::vector<int64_t> watched_ranks_;      // that issue the same collectives; empty: all
  std::shared_ptr<StepTimingBoard> board_;  // null: step timing is not shared
  FaultWatch::Clock::time_point waits_since_;
  std::pair<int64_t, size_t> waited_for_{-1, 0};  // step and bucket
  // Bytes per second of the fastest bucket of the first step; 0: none.
  std::shared_ptr<std::atomic<double>> rate_ = std::make_shared<std::atomic<double>>(0.0);
  // Null if flags travel with the gradients, or not at all.
  std::unique_ptr<FlagExchange> flags_;
  std::unique_ptr<FlagExchange> contributors_;  // see exchange_in()
  std::unique_ptr<FlagExchange> alike_;         // likewise: the bits of a digest
  std::vector<bool> gives_;                     // by bucket; then whether an optimizer has stepped
  bool stepped_ = false;                        // an optimizer, since the last step
  std::function<void(std::vector<int64_t>)> on_skips_;
  std::unique_ptr<Survival> survival_;  // null: a death ends the training
  std::vector<int64_t> counts_;         // used_counts() of a step whose plan has gone; else empty
  mutable std::vector<UnreadFlags> unread_;  // in the order of the steps
  ReducerStats stats_;
  int64_t earlier_steps_ = 0;
};

}  // namespace fastsync::engine
