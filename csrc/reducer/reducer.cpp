#include "reducer/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "check.h"
#include "ops/checks.h"
#include "ops/device.h"

namespace fastsync::engine {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;
using UniqueLock = std::unique_lock<std::recursive_mutex>;

// Returns a number of its own for each reducer of this process.
int64_t next_number() {
  static std::atomic<int64_t> made{0};
  return ++made;
}

std::optional<c10::Stream> stream_of(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
}

// Returns a function to call at the end of a collective that starts now and moves `bytes`. It
// raises `best`, in bytes per second, and calls `next`. It may run on any thread, and after the
// reducer is gone.
std::function<void()> measuring(std::shared_ptr<std::atomic<double>> best, int64_t bytes,
                                std::function<void()> next) {
  const auto start = std::chrono::steady_clock::now();
  return [best = std::move(best), start, bytes, next = std::move(next)] {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    const double rate = static_cast<double>(bytes) / (took.count() + 1e-9);
    double seen = best->load();
    while (seen < rate && !best->compare_exchange_weak(seen, rate)) {
    }
    if (next) next();
  };
}

// A checkpoint recomputes a forward only for the tensors that it saves: its outputs are not
// differentiated.
void refuse_inner_backward() {
  FS_CHECK(false,
           "cannot differentiate a forward of this wrapper that began during a backward of it: its "
           "gradients would be averaged together with those of the running step. Use "
           "torch.utils.checkpoint with use_reentrant=False around calls of the wrapper");
}

}  // namespace

Reducer::Reducer(const std::vector<at::Tensor>& params, const std::vector<std::string>& names,
                 const std::string& group_name, ReducerOptions options,
                 std::shared_ptr<Precision> precision, const std::vector<at::Tensor>& leaves)
    : number_(next_number()),
      options_(options),
      precision_(std::move(precision)),
      routes_{comm::Collective::resolve(group_name), nullptr, nullptr, nullptr, nullptr},
      usage_(params_, options_, routes_.group->rank()) {
  FS_CHECK_VALUE(params.size() == names.size(), "expects one name per parameter");
  divisors_.push_back(routes_.group->size());
  counting_accumulations_ = options_.static_graph;
  planned_.resize(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& leaf = leaves.empty() ? params[i] : leaves.at(i);
    params_.push_back(std::make_unique<Parameter>(Parameter{params[i], names[i], leaf}));
    if (precision_) params_.back()->stored = precision_->stored_dtype(params[i]);
  }
}

GradientHooks& Reducer::hooks() {
  if (!hooks_) {
    std::vector<at::Tensor> tensors;
    for (const auto& param : params_) tensors.push_back(param->leaf);
    const std::weak_ptr<Reducer> weak = weak_from_this();
    auto ready = [weak](size_t param, bool defined) {
      if (const auto self = weak.lock()) self->on_grad_ready(param, defined);
    };
    const auto compute = precision_ ? std::optional(precision_->compute()) : std::nullopt;
    hooks_ = std::make_unique<GradientHooks>(std::move(tensors), std::move(ready), compute);
    if (!precision_) return *hooks_;
    precision_->on_exchange([weak] {
      if (const auto self = weak.lock()) self->hooks_->adopt();
    });
  }
  return *hooks_;
}

// Runs `fn` and keeps the text of its error for the logging data.
template <typename Fn>
auto Reducer::noting_errors(const Fn& fn) {
  try {
    return fn();
  } catch (const std::exception& error) {
    log_.note_error(error.what());
    throw;
  }
}

ForwardAdvice Reducer::prepare_forward(bool captured) {
  const Lock lock(mutex_);
  captured_ = captured;
  log_.pause(captured);
  log_.begin_forward();
  first_node_ = next_node();
  check_agreement();
  return noting_errors([&] { return advise(); });
}

void Reducer::prepare_local_forward() {
  const Lock lock(mutex_);
  first_node_ = next_node();
  noting_errors([&] { check_ended(); });
  attach_thawed();
}

// `task`: cannot be done inside a backward.
void Reducer::leave_backward(const char* task) {
  if (!backward_running_) return;
  FS_CHECK(running_backward() < 0, "cannot ", task, " during a backward");
  forget_failed_backward();
}

// Clears the remains of a backward that an exception has ended. What has been accumulated, then or
// before, belongs to the next step, unless the script has cleared it. Throws if gradients were
// sent, or packed ahead of their bucket, which scales or frees them.
void Reducer::forget_failed_backward() {
  const size_t sent = communicates() ? next_ : 0;
  const size_t total = plan_.buckets.size();
  size_t packed = 0;
  std::vector<size_t> accumulated;
  for (size_t i = sent; i < total; ++i) {
    for (const Slot& slot : plan_.buckets[i].slots()) {
      packed += slot.early ? 1 : 0;
      if (slot.param->used && slot.grad().defined()) accumulated.push_back(slot.index);
    }
  }
  abandon();
  for (const size_t i : accumulated) params_[i]->used = true;
  forwards_.failed();
  FS_CHECK(sent + packed == 0, "the previous backward stopped half-way on rank ",
           routes_.group->rank(), ", after ", sent, " of ", total, " buckets had been sent and ",
           packed,
           " gradients packed for the next: gradients are incomplete, and the ranks may no longer "
           "agree. Expected to have finished reduction in the prior iteration before starting a "
           "new one. Find the exception that left backward() early, or restart from a checkpoint");
}

// Clears them, and throws the complaint of the last backward, if there is one.
void Reducer::check_ended() {
  leave_backward("start a forward of this wrapper");
  usage_.check_forward();
}

// An unfrozen parameter gets a hook at once, whether or not it is planned: a gradient that it
// accumulates counts as used.
void Reducer::attach_thawed() {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i]->leaf.requires_grad()) hooks().attach(i);
  }
}

ForwardAdvice Reducer::advise() {
  check_ended();
  ForwardAdvice advice;
  advice.unused = usage_.take_warning();
  advice.new_timing = board_ && board_->take_change();
  if (captured_) {
    check_capture();
    return advice;
  }
  attach_thawed();
  for (size_t i = 0; i < params_.size(); ++i) {
    const bool trains = params_[i]->leaf.requires_grad();
    if (trains == planned_[i]) continue;
    if (trains || !votes()) {
      advice.regrouped = true;
    } else {
      watch_.wish();
    }
  }
  if (advice.regrouped) log_.progress()->reach(Phase::kMeeting);
  return advice;
}

bool Reducer::recomputes() const {
  const Lock lock(mutex_);
  return backward_running_ && running_backward() >= 0;
}

ForwardAdvice Reducer::announce_backward() {
  const Lock lock(mutex_);
  return noting_errors([&] {
    log_.progress()->reach(Phase::kAfterForward);
    ForwardAdvice advice = advise();
    forwards_.announce();
    return advice;
  });
}

void Reducer::prepare_backward(const std::vector<at::Tensor>& outputs, bool sync) {
  const Lock lock(mutex_);
  if (recomputes()) {
    for (const at::Tensor& output : outputs) {
      on_backward(output, first_node_, &refuse_inner_backward);
    }
    return;
  }
  if (sync) log_.end_forward();
  const auto pass = std::make_shared<ForwardPass>(ForwardPass{sync, forwards_.next()});
  const std::weak_ptr<Reducer> weak = weak_from_this();
  bool watched = false;
  for (const at::Tensor& output : outputs) {
    watched |= on_backward(output, first_node_, [weak, pass] {
      if (const auto self = weak.lock()) self->on_outputs_reached(*pass);
    });
  }
  forwards_.ended(sync, watched);
  if (sync && running_backward() >= 0) forwards_.announce();
}

void Reducer::on_outputs_reached(ForwardPass& pass) {
  const Lock lock(mutex_);
  if (precision_) precision_->begin_backward();
  if (hooks().accumulating()) {
    if (backward_failed()) noting_errors([&] { forget_failed_backward(); });
    note_backward();
    if (forwards_.reached(pass, running_backward())) {
      if (!backward_running_ && !plan_.buckets.empty()) begin_backward();
    }
  }
  if (precision_) precision_->restore_at_end();  // after the end of the step
}

void Reducer::set_static_graph() {
  const Lock lock(mutex_);
  noting_errors([&] {
    FS_CHECK(
        stats_.steps == 0 && !backward_running_,
        "_set_static_graph() should be called before training loop starts and after FastDDP is "
        "constructed; pass static_graph=True to FastDDP instead");
  });
  options_.static_graph = true;
  counting_accumulations_ = true;
}

// Under the lock. Called as often as a backward reaches outputs.
void Reducer::note_backward() {
  const int backward = running_backward();
  if (backward == known_backward_) return;
  known_backward_ = backward;
  ++backwards_;
  if (!weighing_.begin_backward) return;
  const auto used = [](const auto& param) { return param->used; };
  const bool accumulated = std::any_of(params_.begin(), params_.end(), used);
  use_parts(weighing_.begin_backward(accumulated));
}

// Under the lock. What each rank has a part of has to be averaged.
void Reducer::use_parts(const std::vector<size_t>& params) {
  for (const size_t i : params) {
    Parameter& param = *params_.at(i);
    param.part_alone = !param.arrived();
    param.used = true;
  }
}

// Under the lock. Runs inside a backward, whose final callback ends the step.
void Reducer::begin_backward() {
  open_step();
  const auto running = std::make_shared<int>();
  running_ = running;
  end_backward_by(Ending::kSend, &Reducer::close_backward);
  end_backward_by(Ending::kWait, &Reducer::finish_backward);
}

void Reducer::open_step() {
  backward_running_ = true;
  skipping_ = weighed_ = false;
  forget_own();
  counts_.clear();
  log_.begin_backward();
  if (weighing_.start) use_parts(weighing_.start(backwards_));
  for (const auto& ranks : {routes_.memory, routes_.shards}) {
    if (ranks) ranks->begin_step(stats_.steps + 1);
  }
  for (const Routes& group : groups_) {
    if (group.memory) group.memory->begin_step(stats_.steps + 1);
  }
  next_ = 0;
  for (Bucket& bucket : plan_.buckets) bucket.transport().begin();
  watch_.begin_step();
  ++generation_;
}

// See [Note: the end of a backward]. What running_ refers to lives as long as the backward.
void Reducer::end_backward_by(Ending ending, void (Reducer::*step)(int64_t)) {
  const std::weak_ptr<Reducer> weak = weak_from_this();
  at_end_of_backward({ending, number_},
                     [weak, step, running = running_.lock(), mine = generation_] {
                       if (const auto self = weak.lock()) ((*self).*step)(mine);
                     });
}

// A parameter that autograd reached without a gradient counts as unused, but only where that is no
// mistake.
void Reducer::on_grad_ready(size_t param, bool defined) {
  const Lock lock(mutex_);
  if (defined || options_.fail_on_unused || options_.static_graph) {
    params_[param]->used = true;
    params_[param]->part_alone = false;
  }
  if (backward_failed()) noting_errors([&] { forget_failed_backward(); });
  if (!backward_running_ && forwards_.bypassed(running_backward())) {
    note_backward();
    begin_backward();
  }
  if (precision_) precision_->restore_at_end();
  if (!backward_running_) return;
  noting_errors([&] { place_gradient(param); });
}

void Reducer::place_gradient(size_t param) {
  const Place& place = plan_.places[param];
  FS_CHECK(place.bucket >= 0, "parameter '", params_[param]->name,
           "' received a gradient but did not require one at the last forward; unfreeze "
           "parameters before the forward, on every rank");
  Bucket& bucket = plan_.buckets[static_cast<size_t>(place.bucket)];
  const int accumulations = bucket.accumulations(place.slot);
  if (accumulations == 0) watch_.arrived(static_cast<int64_t>(param));
  log_.arrived(param);
  if (accumulations >= params_[param]->expected_accumulations) check_repeated(param, place);
  if (bucket.mark_ready(place.slot, stream_of(params_[param]->tensor))) {
    log_.mark(Mark::kReady, place.bucket);
    if (place.bucket > static_cast<int64_t>(next_)) watch_.bucket_out_of_order();
    advance();
  } else if (communicates() && !counting_accumulations_ && stats_.steps > 0 &&
             may_take_early(bucket, place.slot)) {
    // Not in the first step, which counts how often each gradient arrives.
    weigh();
    bucket.offer(place.slot, packing(bucket.group()));
  }
}

// An unexpected further gradient of a parameter is harmless only before its bucket is sent.
void Reducer::check_repeated(size_t param, const Place& place) const {
  const auto b = static_cast<size_t>(place.bucket);
  const bool sent = communicates() && (next_ > b || plan_.buckets[b].is_final(place.slot));
  FS_CHECK(!sent, "Expected to mark a variable ready only once: parameter '", params_[param]->name,
           "' (index ", param, ") on rank ", routes_.group->rank(),
           " received another gradient after its bucket had been sent. It is used in several "
           "backwards of one step (reentrant activation checkpointing, or backward called twice "
           "inside a backward). Use static_graph=True, or torch.utils.checkpoint with "
           "use_reentrant=False");
}

void Reducer::advance() {
  if (counting_accumulations_) return;
  while (!is_broken() && next_ < plan_.buckets.size() && plan_.buckets[next_].complete()) {
    Bucket& bucket = plan_.buckets[next_];
    const bool idles = idle(bucket, [&](size_t i) { return params_[i]->used; });
    if (communicates() && !idles) {
      weigh();
      if (bucket.transport().ends_early()) make_room();
      with_context(next_, "sending", [&] { send(bucket); });
    }
    ++next_;
  }
  const bool all_sent = next_ == plan_.buckets.size() && !plan_.buckets.empty();
  if (all_sent && flags_ && flags_->overlaps(plan_.buckets.front().device())) start_flags();
}

// Finishes the oldest buckets in flight that hold memory: those that have arrived, and more if too
// many are in flight. A bucket may only arrive after another wrapper's buckets are sent, on this
// rank or another. Such a wait takes its full time, but only once. If a stream waits instead of the
// host, it waits for all buckets above the limit; a bucket whose flags the host has to read stays
// until the end.
void Reducer::make_room() {
  size_t under_way = 0;
  for (size_t i = 0; i < next_; ++i) {
    if (plan_.buckets[i].state() == BucketState::kInFlight) ++under_way;
  }
  for (size_t i = 0; i < next_; ++i) {
    Bucket& bucket = plan_.buckets[i];
    if (bucket.state() != BucketState::kInFlight) continue;
    if (!bucket.transport().ends_early()) return;
    const bool crowded = under_way >= routes_.shards->at_a_time(bucket.device());
    if (!bucket.device().is_cpu() && !bucket.can_be_asked()) {
      if (bucket.missed()) continue;
      if (!crowded && !arrives_within(i, {})) return;
    } else if (!(crowded ? comes_within(i, timeout_) : arrives_within(i, {}))) {
      if (crowded) timeout_ = {};
      return;
    }
    finish(i, {});
    --under_way;
  }
}

void Reducer::finish(size_t index, const std::vector<bool>& used) {
  Bucket& bucket = plan_.buckets[index];
  await(index);
  with_context(index, "receiving", [&] {
    FS_CHECK(!captured_ || !bucket.missed(), "a parameter got no gradient while captured");
    if (bucket.state() == BucketState::kInFlight) bucket.receive();
    // The host will wait for the flags.
    if (bucket.missed()) follow([expected = expected(index)] { return expected; });
    bucket.finish(used);
  });
  keep_unread(bucket);
}

void Reducer::start_flags() {
  if (flags_->started()) return;
  std::vector<bool> used;
  for (const auto& param : params_) used.push_back(param->used);
  flags_->start(used, plan_.buckets.front().device());
}

Packing Reducer::packing(size_t group) const {
  Packing how;
  // A communication hook divides what it reduces.
  how.scale = weighed_ ? scale_ : ops::Scale(routes_.hook ? 1.0 : 1.0 / divisors_[group]);
  how.vote = votes() && watch_.vote();
  how.check_finite = options_.check_finite;
  how.squares = squares_;
  how.step = static_cast<uint64_t>(steps());
  how.repeatable = survival_ != nullptr;
  return how;
}

// The factor that follows from the sum of all ranks' weights has to be known before anything is
// packed.
void Reducer::weigh() {
  if (weighed_ || !weighing_.scale) return;
  const Lap lap = log_.waiting();  // for the rank that begins its backward last
  scale_ = std::visit([](const auto& by) { return ops::Scale(by); }, weighing_.scale());
  weighed_ = true;
  scaled_on_ = scale_.tensor.defined() ? stream_of(scale_.tensor) : std::nullopt;
}

// Buckets may be packed on other streams.
void Reducer::wait_for_scale() const {
  if (!weighed_ || !scaled_on_) return;
  const auto current = stream_of(scale_.tensor);
  if (current == scaled_on_) return;
  c10::Event event(current->device_type());
  event.record(*scaled_on_);
  event.block(*current);
}

void Reducer::launch(Bucket& bucket) {
  log_.sending();
  wait_for_scale();
  bucket.pack(packing(bucket.group()));
  const auto index = static_cast<int64_t>(next_);
  log_.mark(Mark::kPacked, index);
  const Transport& transport = bucket.transport();
  log_.mark(Mark::kLaunched, index, transport.bytes());
  bucket.launch();
  auto done = log_.on_done(index);
  // On devices the callback comes when a collective is enqueued, not when it ends.
  const bool timed = stats_.steps == 0 && !transport.is_users() && bucket.device().is_cpu();
  if (timed) done = measuring(rate_, bucket.gradient_bytes(), std::move(done));
  if (done) bucket.on_done(std::move(done));
  ++stats_.collectives;
  stats_.bytes += transport.bytes();
  stats_.sent_bytes += transport.sent_bytes();
  stats_.between_nodes_bytes += transport.between_nodes_bytes();
  log_.sent();
}

template <typename Fn>
void Reducer::with_context(size_t bucket, const char* what, const Fn& fn) {
  if (plan_.buckets[bucket].transport().is_users()) return fn();
  try {
    fn();
  } catch (const std::exception& error) {
    fail(bucket, what, error.what());
  }
}

void Reducer::close_backward(int64_t generation) {
  const Lock lock(mutex_);
  if (!is_running(generation)) return;
  log_.end_backward();
  or_abandon([&] {
    counting_accumulations_ = false;
    close_buckets();
    if (options_.may_skip && communicates()) start_contributors();
  });
  log_.begin_wait();
}

void Reducer::finish_backward(int64_t generation) {
  UniqueLock lock(mutex_);
  if (!is_running(generation)) return;
  std::vector<int64_t> contributors;
  bool includes_dead = false;  // the averages contain gradients of ranks that are gone
  or_abandon([&] {
    if (survival_) includes_dead = agree_on_averages(lock);
    finish_buckets();
    scale_alone();
    contributors = await_contributors();
    for (const auto& action : std::exchange(at_end_, {})) action();
  });
  const std::string change = usage_.find_change(planned_);
  end_step();
  forget_own();
  if (includes_dead) return rebuild(lock);
  lock.unlock();
  if (!contributors.empty() && on_skips_) on_skips_(contributors);
  call_what_is_due();  // before this rank alone complains
  lock.lock();
  noting_errors([&] { FS_CHECK(change.empty(), change); });
}

template <typename Fn>
void Reducer::or_abandon(const Fn& fn) {
  try {
    noting_errors(fn);
  } catch (...) {
    abandon();
    throw;
  }
}

void Reducer::close_buckets() {
  for (size_t i = next_; i < plan_.buckets.size(); ++i) {  // earlier ones may have finished
    if (!plan_.buckets[i].complete()) log_.mark(Mark::kReady, static_cast<int64_t>(i));
    plan_.buckets[i].close();
  }
  if (!skipping_) usage_.end_backward(planned_);
  advance();
}

// skip_all_reduce_unused_params: no rank uses any of the bucket's parameters, as the user promised.
bool Reducer::idle(const Bucket& bucket, const std::function<bool(size_t)>& used) const {
  if (!options_.skip_unused) return false;
  return std::none_of(bucket.slots().begin(), bucket.slots().end(),
                      [&](const Slot& slot) { return used(slot.index); });
}

void Reducer::end_step() {
  std::vector<bool> used;
  for (const auto& param : params_) used.push_back(param->used);
  log_.end_step(std::move(used));
  std::vector<int64_t> missing;
  for (const Bucket& bucket : plan_.buckets) {
    for (const Slot& slot : bucket.slots()) {
      if (!slot.param->used) missing.push_back(static_cast<int64_t>(slot.index));
    }
  }
  watch_.end_step(missing);
  for (const auto& param : params_) param->used = param->part_alone = false;
  backward_running_ = false;
  backwards_ = 0;
  log_.count_steps(++stats_.steps);
  forget_unused_plans();
}

void Reducer::abandon() {
  for (Bucket& bucket : plan_.buckets) bucket.abandon();
  if (flags_) flags_->abandon();
  if (contributors_) contributors_->abandon();
  for (const auto& param : params_) param->used = false;
  backward_running_ = false;
  backwards_ = 0;
  next_ = 0;
}

// -- plans --

namespace {

// A plan that has been unused for so many steps is dropped with its buffers.
constexpr int64_t kKeptSteps = 32;

// A codec of the user that notes in the training's progress when it runs: it may hang on a thread
// that no wait names.
class WatchedCodec final : public Codec {
 public:
  WatchedCodec(std::shared_ptr<Codec> codec, std::shared_ptr<Progress> progress)
      : codec_(std::move(codec)), progress_(std::move(progress)) {}

  void encode(const at::Tensor& values, const at::Tensor& payload) override {
    const Progress::Coding at_work(*progress_);
    codec_->encode(values, payload);
  }
  void decode(const at::Tensor& payload, const at::Tensor& values) override {
    const Progress::Coding at_work(*progress_);
    codec_->decode(payload, values);
  }

 private:
  std::shared_ptr<Codec> codec_;
  std::shared_ptr<Progress> progress_;
};

// Returns the same bucket; a codec of the user reports when it runs.
BucketSpec watched(BucketSpec spec, const std::shared_ptr<Progress>& progress) {
  if (spec.coded && spec.coded->codec) {
    spec.coded->codec = std::make_shared<WatchedCodec>(std::move(spec.coded->codec), progress);
  }
  return spec;
}

}  // namespace

void Reducer::set_plan(const std::vector<BucketSpec>& specs, int64_t until, bool keep) {
  const Lock lock(mutex_);
  leave_backward("change the plan");
  Plan plan;
  plan.places.resize(params_.size());
  for (size_t b = 0; b < specs.size(); ++b) {
    for (size_t s = 0; s < specs[b].slots.size(); ++s) {
      Place& place = plan.places.at(static_cast<size_t>(specs[b].slots[s].param));
      FS_CHECK_VALUE(place.bucket < 0, "the plan holds a parameter twice");
      place = Place{static_cast<int64_t>(b), s};
    }
    plan.buckets.emplace_back(watched(specs[b], log_.progress()), params_, routes(specs[b].group),
                              b, specs.size());
  }
  plan.until = until;
  plan.number = stats_.plans + 1;
  check_covers(plan);
  install(std::move(plan), keep);
  ++stats_.plans;
  watch_.plan_installed();
}

bool Reducer::restore_plan(int64_t number) {
  const Lock lock(mutex_);
  leave_backward("change the plan");
  const auto kept = kept_plans_.find(number);
  if (kept == kept_plans_.end()) return false;
  check_covers(kept->second);
  install(std::move(kept_plans_.extract(kept).mapped()), /*keep=*/true);
  watch_.plan_restored();
  return true;
}

bool Reducer::keeps_plan(int64_t number) const {
  const Lock lock(mutex_);
  return kept_plans_.count(number) > 0;
}

void Reducer::check_covers(const Plan& plan) const {
  for (size_t i = 0; i < params_.size(); ++i) {
    const bool planned = plan.places[i].bucket >= 0;
    FS_CHECK_VALUE(planned || !params_[i]->leaf.requires_grad(), "the plan lacks parameter '",
                   params_[i]->name, "'");
  }
}

// Installs a plan that has passed all checks.
void Reducer::install(Plan plan, bool keep) {
  const Residuals residuals = residual_views();
  counts_ = used_counts();  // the buckets that hold the counts go
  for (size_t i = 0; i < params_.size(); ++i) {
    const bool planned = plan.places[i].bucket >= 0;
    if (planned_[i] != planned) {
      log_.forget_used();
      usage_.forget();
    }
    planned_[i] = planned;
  }
  std::swap(plan, plan_);
  if (keep) {
    plan.replaced = stats_.steps;
    kept_plans_.insert_or_assign(plan.number, std::move(plan));
  }
  load_residuals(residuals);
  hooks().update();
  log_.plan_installed(plan_.number);
  log_.progress()->plan(static_cast<int64_t>(plan_.buckets.size()));
}

void Reducer::forget_plans() {
  const Lock lock(mutex_);
  kept_plans_.clear();
}

// At the end of a step.
void Reducer::forget_unused_plans() {
  for (auto kept = kept_plans_.begin(); kept != kept_plans_.end();) {
    const bool unused = stats_.steps - kept->second.replaced >= kKeptSteps;
    kept = unused ? kept_plans_.erase(kept) : std::next(kept);
  }
}

void Reducer::on_plan_due(std::function<void()> fn) {
  const Lock lock(mutex_);
  plan_due_ = std::move(fn);
}

// Every rank calls this after the same steps. Not under the lock: Python plans, and other Python
// threads may query the reducer.
void Reducer::call_what_is_due() {
  bool compares = false;
  std::function<void()> make_plan;
  {
    const Lock lock(mutex_);
    if (captured_) return;
    compares = compared_every_ > 0 && steps() % compared_every_ == 0;
    const bool asked = watch_.replan_due();
    if (asked || (plan_.until >= 0 && steps() >= plan_.until)) make_plan = plan_due_;
  }
  // Compares before a new plan: by the plan that the gradients travelled with.
  if (compares) call(Phase::kComparing, [this] { compare(); });
  call(Phase::kPlanning, make_plan);
}

void Reducer::call(Phase phase, const std::function<void()>& fn) {
  if (!fn) return;
  if (precision_) precision_->end_forward();  // Python reads the stored parameters
  log_.progress()->reach(phase);
  fn();
  log_.restart_timing();
  log_.progress()->reach(Phase::kBetweenSteps);
}

// -- state that is read or set between steps --

// State of a reducer that is read or set between steps: its counters, the residuals of parameters,
// its routes between ranks.
//
// [Note: parked residuals]
// A residual is the part that the averages still lack. It must not be lost while its parameter is
// frozen, or lies in a bucket without error feedback (a warm-up, a small bucket, a single rank). It
// is then parked here until a bucket takes it, or until the user turns error feedback off.

namespace {

// Copies a view that would keep a whole bucket's memory.
at::Tensor own(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.storage().nbytes() == tensor.nbytes()) return tensor;
  return ops::copy_of(tensor);
}

}  // namespace

std::vector<int64_t> Reducer::ready_order() const {
  const Lock lock(mutex_);
  return watch_.ready_order();
}

std::vector<bool> Reducer::trainable() const {
  std::vector<bool> flags;
  flags.reserve(params_.size());
  for (const auto& param : params_) flags.push_back(param->leaf.requires_grad());
  return flags;
}

StepReport Reducer::last_step() const {
  const Lock lock(mutex_);
  return log_.report();
}

std::vector<int64_t> Reducer::used_counts() const {
  const Lock lock(mutex_);
  if (!counts_.empty()) return counts_;
  std::vector<int64_t> counts = flags_ ? flags_->counts() : std::vector<int64_t>();
  if (!counts.empty()) return counts;
  counts.assign(log_.used().begin(), log_.used().end());
  if (!communicates() || !votes() || counts.empty()) return counts;
  const std::vector<bool>& used = log_.used();
  for (const Bucket& bucket : plan_.buckets) {
    // A bucket that was left out still has the flags of an earlier step.
    if (!idle(bucket, [&](size_t i) { return used[i]; })) bucket.count_uses(counts);
  }
  return counts;
}

std::vector<std::pair<int64_t, bool>> Reducer::nonfinite() const {
  const Lock lock(mutex_);
  read_flags();
  std::vector<std::pair<int64_t, bool>> found;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!params_[i]->nonfinite) continue;
    found.emplace_back(static_cast<int64_t>(i), params_[i]->nonfinite_here);
  }
  return found;
}

ReducerStats Reducer::stats() const {
  const Lock lock(mutex_);
  ReducerStats stats = stats_;
  for (const Bucket& bucket : plan_.buckets) {
    stats.residual_bytes += bucket.transport().residual_bytes();
  }
  for (const at::Tensor& residual : parked_) {
    if (residual.defined()) stats.residual_bytes += static_cast<int64_t>(residual.nbytes());
  }
  return stats;
}

Residuals Reducer::residual_views() const {
  Residuals views = parked_;
  views.resize(params_.size());
  for (const Bucket& bucket : plan_.buckets) bucket.transport().read(views);
  return views;
}

Residuals Reducer::residuals() const {
  const Lock lock(mutex_);
  Residuals copies = residual_views();
  for (at::Tensor& copy : copies) {
    if (copy.defined()) copy = ops::copy_of(copy);
  }
  return copies;
}

void Reducer::load_residuals(const Residuals& residuals) {
  const Lock lock(mutex_);
  leave_backward("load what parameters carry");
  FS_CHECK_VALUE(residuals.size() == params_.size(), "expects one residual per parameter, but got ",
                 residuals.size(), " for ", params_.size());
  Residuals parked(params_.size());
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!holds_residual(plan_.places[i].bucket)) parked[i] = own(residuals[i]);
  }
  for (Bucket& bucket : plan_.buckets) bucket.transport().load(residuals);
  parked_ = std::move(parked);
}

bool Reducer::holds_residual(int64_t bucket) const {
  return bucket >= 0 && plan_.buckets[static_cast<size_t>(bucket)].transport().residual_bytes() > 0;
}

void Reducer::drop_parked(const std::vector<int64_t>& params) {
  const Lock lock(mutex_);
  if (parked_.empty()) return;
  for (const int64_t param : params) parked_.at(static_cast<size_t>(param)).reset();
}

void Reducer::check_capture() const {
  FS_CHECK(watch_.knows_order(),
           "a step cannot be captured before the buckets are planned: train a few steps first");
  FS_CHECK(!options_.check_finite,
           "a step that is captured into a CUDA graph cannot look at its gradients; use "
           "nonfinite='ignore'");
  for (size_t i = 0; i < params_.size(); ++i) {
    FS_CHECK(planned_[i] || !params_[i]->leaf.requires_grad(), "parameter '", params_[i]->name,
             "' was unfrozen just before a step is captured; train a few steps in between");
  }
}

void Reducer::set_divisor(double divisor) {
  const Lock lock(mutex_);
  FS_CHECK_VALUE(divisor > 0, "gradients cannot be divided by ", divisor);
  divisors_.front() = divisor;
}

void Reducer::add_group(const std::string& group_name, double divisor) {
  const Lock lock(mutex_);
  FS_CHECK_VALUE(divisor > 0, "gradients cannot be divided by ", divisor);
  groups_.push_back({comm::Collective::resolve(group_name), nullptr, nullptr, nullptr, nullptr});
  divisors_.push_back(divisor);
  watch_over(groups_.back().group);
}

void Reducer::use_weights(Weighing weighing) {
  const Lock lock(mutex_);
  weighing_ = std::move(weighing);
}

void Reducer::resume(int64_t steps) {
  const Lock lock(mutex_);
  leave_backward("resume a training");
  FS_CHECK_VALUE(steps >= 0, "a training cannot have ", steps, " steps");
  earlier_steps_ = steps - stats_.steps;
}

void Reducer::set_hook(comm::Hook hook, const std::string& flags_group) {
  const Lock lock(mutex_);
  leave_backward("change the communication hook");
  routes_.hook = std::move(hook);
  flags_.reset();
  if (!votes() || options_.static_graph) return;
  std::shared_ptr<comm::Collective> own = routes_.memory;  // no bucket under a hook uses it
  if (!own && !flags_group.empty()) {
    own = comm::Collective::resolve(flags_group);
    watch_over(own);
  }
  flags_ = std::make_unique<FlagExchange>(own ? own : routes_.group, own != nullptr);
}

void Reducer::detach_hooks() {
  const Lock lock(mutex_);
  hooks().detach();
}

void Reducer::at_end(std::function<void()> action) {
  const Lock lock(mutex_);
  at_end_.push_back(std::move(action));
}

void Reducer::use_group(const std::string& group_name) {
  const Lock lock(mutex_);
  abandon();
  routes_.group = comm::Collective::resolve(group_name);
  watch_over(routes_.group);
  drop_exchanges();
  if (survival_) routes_.group->let_host_wait(survival_->survivors.timeout);
  routes_.memory = nullptr;
  log_.progress()->restart();
  divisors_.front() = routes_.group->size();
  usage_.set_rank(routes_.group->rank());
  watch_.group_changed();
}

// Returns an exchange of flags among all ranks, whose buffer stays until these change.
FlagExchange& Reducer::exchange_in(std::unique_ptr<FlagExchange>& kept) const {
  const auto& group = routes_.memory ? routes_.memory : routes_.group;
  if (!kept) kept = std::make_unique<FlagExchange>(group, /*own=*/false);
  return *kept;
}

void Reducer::drop_exchanges() {
  contributors_.reset();
  alike_.reset();
  if (survival_) survival_->vote.reset();
}

void Reducer::use_shards(const std::string& group_name) {
  const Lock lock(mutex_);
  routes_.shards = comm::Collective::resolve(group_name);
  watch_over(routes_.shards);
}

void Reducer::use_memory(std::shared_ptr<comm::Collective> sums,
                         std::shared_ptr<comm::Collective> regions,
                         std::shared_ptr<ops::BufferPool> pool, size_t group) {
  const Lock lock(mutex_);
  Routes& used = routes(group);
  used.memory = std::move(sums);
  drop_exchanges();
  used.shards = std::move(regions);
  used.pool = std::move(pool);
}

void Reducer::use_pipelines(std::vector<std::shared_ptr<comm::Collective>> stages, size_t group) {
  const Lock lock(mutex_);
  for (const auto& stage : stages) watch_over(stage);
  routes(group).pipelines = std::make_shared<comm::Pipelines>(std::move(stages));
}

void Reducer::shadow_step() {
  UniqueLock lock(mutex_);
  if (plan_.buckets.empty()) return;  // nothing is trained, so the others make no step either
  std::vector<Shadow> shadows;
  const std::vector<bool>& used = log_.used();
  for (size_t i = 0; i < plan_.buckets.size(); ++i) {
    if (idle(plan_.buckets[i], [&](size_t param) { return used.empty() || used[param]; })) continue;
    shadows.push_back(plan_.buckets[i].transport().shadow(packing().step));
  }
  for (const Shadow& shadow : shadows) {
    log_.progress()->issue();
    shadow.in_flight->wait();
  }
  if (flags_) {
    // This rank uses no parameter in the other ranks' step.
    flags_->start(std::vector<bool>(params_.size(), false), plan_.buckets.front().device());
    flags_->wait([this](comm::InFlight& flags) {
      flags.wait();
      follow_step();
    });
  }
  follow_step();
  watch_.note_votes(shadows.empty() ? at::Tensor() : shadows.back().vote());
  watch_.end_shadow_step();
  log_.count_steps(++stats_.steps);
  forget_unused_plans();
  lock.unlock();
  call_what_is_due();
}

std::optional<GradientSquares> Reducer::squares(const std::vector<at::Tensor>& params,
                                                const ShardedUnits& units) {
  const Lock lock(mutex_);
  squares_ = true;
  for (const auto& unit : units) unit->squares.want();
  std::vector<HeldGradients> held;
  for (const Bucket& bucket : plan_.buckets) {
    if (!bucket.transport().holds_gradients()) continue;
    HeldGradients& all = held.emplace_back(HeldGradients{{}, &bucket.transport()});
    for (const Slot& slot : bucket.slots()) all.gradients.push_back(slot.grad());
  }
  return known_squares(params, units, held);
}

int64_t Reducer::start_gather(const at::Tensor& flat) {
  const Lock lock(mutex_);
  check_agreement();
  const at::NoGradGuard no_grad;
  const int64_t ranks = routes_.group->size();
  if (ranks == 1) return 0;
  FS_CHECK(routes_.shards, "there is no process group for regions");
  while (gathers_.size() >= routes_.shards->at_a_time(flat.device())) {
    await_region(*gathers_.front());
    gathers_.pop_front();
  }
  const int64_t region = flat.numel() / ranks;
  const auto part = ops::run_of(flat, routes_.group->rank() * region, region);
  gathers_.push_back(routes_.shards->all_gather(flat, part));
  log_.progress()->issue_of_kind(/*evaluates=*/false, /*in_backward=*/false, /*about=*/0);
  const int64_t bytes = region * static_cast<int64_t>(flat.itemsize());
  ++stats_.collectives;
  stats_.bytes += ranks * bytes;
  stats_.sent_bytes += routes_.shards->leaving((ranks - 1) * bytes);
  return static_cast<int64_t>(gathers_.size());
}

void Reducer::finish_gathers() {
  const Lock lock(mutex_);
  for (const auto& gather : std::exchange(gathers_, {})) await_region(*gather);
}

// -- waiting for other ranks --

void Reducer::use_watch(std::shared_ptr<FaultWatch> watch, std::vector<int64_t> ranks) {
  const Lock lock(mutex_);
  faults_ = std::move(watch);
  watched_ranks_ = std::move(ranks);
  log_.use_board(board_ = nullptr);
  if (!faults_) return;
  std::vector<std::string> names;
  for (const auto& param : params_) names.push_back(param->name);
  // On devices the host does not wait for averages, so its times say nothing.
  const bool on_cpu = !params_.empty() && params_.front()->tensor.is_cpu();
  board_ = on_cpu ? std::make_shared<StepTimingBoard>(routes_.group->rank(), routes_.group->size())
                  : nullptr;
  log_.use_board(board_);
  watched_as_ = faults_->add(log_.progress(), std::move(names), board_);
  for (const auto& ranks : {routes_.group, routes_.shards}) watch_over(ranks);
  for (const Routes& group : groups_) watch_over(group.group);
}

// Lets a fault abort the collectives of these ranks on a device.
void Reducer::watch_over(const std::shared_ptr<comm::Collective>& ranks) {
  if (!faults_ || !ranks || params_.empty() || params_.front()->tensor.is_cpu()) return;
  faults_->add_communicator(ranks->communicator(params_.front()->tensor.device()));
}

// Lets the monitor follow the collective that `what` describes, for which the current stream waits
// and the host does not. With elastic training the host waits itself; a mark in a captured stream
// would say nothing.
void Reducer::follow(std::function<ExpectedCollective()> what) {
  if (!faults_ || survival_ || captured_ || params_.empty()) return;
  const at::Device device = params_.front()->tensor.device();
  if (!device.is_cpu()) faults_->follow(ops::mark_stream(device), std::move(what));
}

// Follows all averages of the step.
void Reducer::follow_step() {
  const int64_t issued = log_.progress()->issued();
  follow([model = watched_as_, ranks = watched_ranks_, issued, step = stats_.steps + 1,
          buckets = plan_.buckets.size()] {
    ExpectedCollective expected;
    expected.model = model;
    expected.ranks = ranks;
    expected.issued = issued;
    expected.label = concat("the averages of step ", step, " (", buckets, " buckets)");
    return expected;
  });
}

// With elastic training, errors of the watch are not final.
void Reducer::check_agreement() {
  if (faults_ && !survival_) faults_->check_agreement();
}

std::optional<StepTimingReport> Reducer::step_timing() const {
  const Lock lock(mutex_);
  return board_ ? board_->latest() : std::nullopt;
}

double Reducer::busy_seconds() const {
  const Lock lock(mutex_);
  return 1e-9 * static_cast<double>(log_.busy());
}

void Reducer::await_buffers(const std::function<void()>& exchange) {
  const Lap lap = log_.waiting();
  exchange();
}

ExpectedCollective Reducer::expected(size_t bucket) const {
  ExpectedCollective result;
  result.model = watched_as_;
  result.ranks = watched_ranks_;
  result.bucket = static_cast<int64_t>(bucket);
  result.issued = log_.progress()->issued_with(result.bucket + 1);
  result.label = concat("bucket ", bucket, " of ", plan_.buckets.size(), " (",
                        plan_.buckets[bucket].describe(), ") of step ", stats_.steps + 1);
  for (const Slot& slot : plan_.buckets[bucket].slots()) {
    result.parameters.push_back(slot.param->name);
  }
  return result;
}

void Reducer::finish_buckets() {
  check_agreement();
  if (!communicates()) {
    for (Bucket& bucket : plan_.buckets) {
      if (options_.check_finite) {
        bucket.check_finite();
        bucket.note_finite(/*travelled=*/false);
        keep_unread(bucket);
      }
      bucket.abandon();
    }
    return;
  }
  std::vector<bool> used;
  const auto start = std::chrono::steady_clock::now();
  if (flags_) {
    for (Bucket& bucket : plan_.buckets) {
      if (bucket.state() == BucketState::kInFlight) bucket.receive();
    }
    start_flags();  // if they had to wait for all hooks
    used = flags_->wait([this](comm::InFlight& flags) {
      flags.wait();
      follow_step();  // before the host waits for them
    });
  }
  if (!flags_) used = read_missed();
  const Bucket* last = nullptr;
  const Bucket* voted = nullptr;
  for (size_t i = 0; i < plan_.buckets.size(); ++i) {
    if (plan_.buckets[i].state() == BucketState::kReady) {
      plan_.buckets[i].abandon();  // idle
      continue;
    }
    const bool finished = plan_.buckets[i].state() == BucketState::kFilling;
    if (!finished) finish(i, used);
    last = &plan_.buckets[i];
    if (last->group() == 0) voted = last;
  }
  if (last) follow_step();
  stats_.exposed_seconds +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  watch_.note_votes(voted && !captured_ && votes() ? voted->transport().vote() : at::Tensor());
}

// On devices: returns which parameters any rank has used, if this rank lacks gradients; else
// nothing. The host waits once for all buckets.
std::vector<bool> Reducer::read_missed() {
  std::vector<const Bucket*> missed;
  std::vector<at::Tensor> sums;
  for (size_t i = 0; i < plan_.buckets.size() && !captured_; ++i) {
    Bucket& bucket = plan_.buckets[i];
    const bool waits = bucket.state() == BucketState::kInFlight && bucket.missed();
    if (!waits || bucket.device().is_cpu()) continue;
    await(i);
    try {
      bucket.receive();
    } catch (const std::exception& error) {
      fail(i, "receiving", error.what());
    }
    const at::Tensor flags = bucket.sums_of_flags();
    if (!flags.defined()) continue;
    missed.push_back(&bucket);
    sums.push_back(flags);
  }
  if (missed.empty()) return {};
  std::vector<bool> used;
  for (const auto& param : params_) used.push_back(param->used);
  const at::Tensor all = at::cat(sums).to(at::kCPU);
  const float* next = all.const_data_ptr<float>();
  for (const Bucket* bucket : missed) {
    for (const Slot& slot : bucket->slots()) used[slot.index] = *next++ > 0.0F || slot.param->used;
  }
  return used;
}

void Reducer::keep_unread(Bucket& bucket) {
  constexpr size_t kMostUnread = 4096;  // if the script never reads them
  auto unread = bucket.take_unread();
  if (!unread) return;
  if (unread_.size() >= kMostUnread) read_flags();
  unread_.push_back(std::move(*unread));
}

// See [Note: flags that stay on a device].
void Reducer::read_flags() const {
  if (unread_.empty()) return;
  std::vector<at::Tensor> flags;
  for (const UnreadFlags& each : unread_) flags.insert(flags.end(), {each.sums, each.own});
  const at::Tensor all = at::cat(flags).to(at::kCPU);
  const float* next = all.const_data_ptr<float>();
  for (const UnreadFlags& each : std::exchange(unread_, {})) {
    const size_t count = each.params.size();
    for (size_t i = 0; i < count; ++i) {
      if (next[i] == 0.0F) continue;  // the gradient stayed as it was
      Parameter& param = *each.params[i];
      param.nonfinite = !std::isfinite(next[i]) || (each.added[i] && param.nonfinite);
      param.nonfinite_here = !std::isfinite(next[count + i]);
    }
    next += 2 * count;
  }
}

// A rank that stops waiting, as in make_room(), and comes back has waited all the time.
void Reducer::begin_to_await(size_t index) {
  log_.progress()->await(static_cast<int64_t>(index));
  const std::pair<int64_t, size_t> which{stats_.steps, index};
  if (std::exchange(waited_for_, which) != which) waits_since_ = FaultWatch::Clock::now();
}

// Waits before a bucket is received. Returns at once if streams wait for it, not the host.
void Reducer::await(size_t index) {
  Bucket& bucket = plan_.buckets[index];
  if (bucket.state() != BucketState::kInFlight) return;
  begin_to_await(index);
  if (!faults_ || !bucket.can_be_asked()) return;
  if (arrives_within(index, {})) return;
  faults_->wait(expected(index),
                [&](std::chrono::milliseconds time) { return arrives_within(index, time); });
}

// Whether a bucket arrives within `timeout`; watches for faults meanwhile.
bool Reducer::comes_within(size_t index, std::chrono::milliseconds timeout) {
  if (!faults_ || !plan_.buckets[index].can_be_asked()) return arrives_within(index, timeout);
  begin_to_await(index);
  const auto start = FaultWatch::Clock::now();
  bool here = false;
  faults_->wait(expected(index), [&](std::chrono::milliseconds time) {
    here = arrives_within(index, time);
    return here || FaultWatch::Clock::now() - start >= timeout;
  });
  return here;
}

bool Reducer::arrives_within(size_t index, std::chrono::milliseconds time) {
  const Lap lap = log_.waiting();
  try {
    return plan_.buckets[index].arrives_within(time);
  } catch (const std::exception& error) {
    fail(index, "receiving", error.what());
  }
  return false;
}

// Returns the seconds of the current wait.
double Reducer::waited() const {
  const ProgressSnapshot at = log_.progress()->now();
  if (static_cast<Phase>(at.phase) < Phase::kWaiting) return 0;
  return std::chrono::duration<double>(FaultWatch::Clock::now() - waits_since_).count();
}

// Waits for regions of parameters that an optimizer has updated.
void Reducer::await_region(comm::InFlight& gather) {
  const auto label = concat("the gathering of parameters after step ", stats_.steps);
  await_last_issued(gather, Phase::kGathering, label);
  log_.progress()->reach(Phase::kBetweenSteps);
}

// Waits for the collective that was started last. `label`: its name in errors.
void Reducer::await_last_issued(comm::InFlight& work, Phase phase, const std::string& label) {
  log_.progress()->reach(phase);
  ExpectedCollective expected;
  expected.model = watched_as_;
  expected.ranks = watched_ranks_;
  expected.issued = log_.progress()->issued();
  expected.label = label;
  waits_since_ = FaultWatch::Clock::now();
  const Lap lap = log_.waiting();
  const auto explained = [&](const auto& wait) {
    try {
      return wait();
    } catch (const std::exception& error) {
      if (faults_) faults_->explain(expected, error.what(), waited());
      throw;
    }
  };
  if (faults_ && work.can_be_asked()) {
    faults_->wait(expected, [&](std::chrono::milliseconds time) {
      return explained([&] { return work.is_done_within(time); });
    });
  }
  explained([&] { return work.wait(); });
  follow([expected] { return expected; });
}

void Reducer::fail(size_t bucket, const char* what, const std::string& error) {
  if (faults_ && communicates()) faults_->explain(expected(bucket), error, waited());
  throw std::runtime_error(concat("fastsync: rank ", routes_.group->rank(), ", ", what, " bucket ",
                                  bucket, " of ", plan_.buckets.size(), " (",
                                  plan_.buckets[bucket].describe(), "): ", error));
}

// -- skipped steps --

void Reducer::on_skips(std::function<void(std::vector<int64_t>)> fn) {
  const Lock lock(mutex_);
  on_skips_ = std::move(fn);
}

void Reducer::note_optimizer() {
  const Lock lock(mutex_);
  stepped_ = true;
}

void Reducer::skip_step() {
  const at::NoGradGuard no_grad;
  int64_t generation = 0;
  {
    const Lock lock(mutex_);
    FS_CHECK(options_.may_skip, "this model does not skip steps");
    FS_CHECK(running_backward() < 0, "cannot skip a step inside a backward");
    if (faults_) faults_->check_agreement();
    forwards_.skipped();
    if (plan_.buckets.empty()) return;
    if (!backward_running_) open_step();
    withhold();
    generation = generation_;
  }
  close_backward(generation);
  finish_backward(generation);
}

// Drops the gradients that have not been sent.
void Reducer::withhold() {
  skipping_ = true;
  for (size_t i = next_; i < plan_.buckets.size(); ++i) {
    Bucket& bucket = plan_.buckets[i];
    bucket.abandon();
    bucket.transport().begin();
    for (const Slot& slot : bucket.slots()) {
      slot.param->used = false;
      slot.mutable_grad().reset();
    }
  }
  gives_.assign(next_, true);
}

void Reducer::start_contributors() {
  if (!skipping_) gives_.assign(plan_.buckets.size(), true);
  gives_.resize(plan_.buckets.size());
  gives_.push_back(std::exchange(stepped_, false));
  exchange_in(contributors_).start(gives_, plan_.buckets.front().device());
  log_.progress()->issue();
}

// Returns the number of contributors by parameter; empty if every rank has contributed to all.
std::vector<int64_t> Reducer::await_contributors() {
  if (!contributors_ || !contributors_->started()) return {};
  const auto label = concat("the count of the ranks that do not skip step ", stats_.steps + 1);
  contributors_->wait(
      [&](comm::InFlight& votes) { await_last_issued(votes, Phase::kWaiting, label); });
  std::vector<int64_t> by_bucket = contributors_->counts();
  const int64_t stepped = by_bucket.back();
  by_bucket.pop_back();
  const int64_t ranks = routes_.group->size();
  FS_CHECK(stepped == 0 || stepped == ranks, "only ", stepped, " of ", ranks,
           " ranks have called optimizer.step() after step ", stats_.steps, ", rank ",
           routes_.group->rank(), gives_.back() ? " among them" : " not",
           ": their weights differ. After `with model.skipping(...)` every rank has to, whether "
           "it has skipped the step or not; restart from a checkpoint");
  const auto all = [ranks](int64_t count) { return count == ranks; };
  if (std::all_of(by_bucket.begin(), by_bucket.end(), all)) return {};
  std::vector<int64_t> counts(params_.size(), -1);
  for (size_t b = 0; b < plan_.buckets.size(); ++b) {
    for (const Slot& slot : plan_.buckets[b].slots()) counts[slot.index] = by_bucket[b];
  }
  return counts;
}

// -- comparison of ranks --

// Compares parameters and averages between ranks, bit for bit.
//
// [Note: comparing costs no Python]
// Each rank digests its parameters and averages where they lie, in one pass. The digest of these
// digests is one number of 64 bits, whose bits are summed up over the ranks like used flags. If the
// ranks are alike, each bit is set on all ranks or on none. Each part of the ranks that has a group
// of parameters of its own has 64 bits of its own, too, which the others leave unset. All ranks see
// the same sums and draw the same conclusion, however many they are. Python is only called if they
// differ. It gets the digests of single tensors as they were compared; memory may have changed
// since.
//
// All this happens before backward() returns. A sum that travelled with the next step's gradients
// would cost no wait. But by then the optimizer would have stepped, perhaps on a wrong average.

namespace {

constexpr size_t kDigestBits = 64;

// Whether this rank has all elements. The gradients of ZeRO, of a class of their own, are sharded
// over the ranks.
bool is_whole(const at::Tensor& grad) {
  return grad.defined() && !grad.unsafeGetTensorImpl()->is_python_dispatch() &&
         grad.layout() == at::kStrided;
}

}  // namespace

void Reducer::compare_every(int64_t steps, std::function<void(std::vector<int64_t>)> differ,
                            ReplicaSets sets) {
  const Lock lock(mutex_);
  FS_CHECK_VALUE(steps > 0, "nothing can be compared every ", steps, " steps");
  FS_CHECK_VALUE(sets.of.size() == params_.size(), "every parameter is in a set of replicas");
  for (const size_t set : sets.of) {
    FS_CHECK_VALUE(set < sets.ranks.size(), "there is no set ", set, " of replicas");
  }
  compared_every_ = steps;
  differ_ = std::move(differ);
  replicas_ = std::move(sets);
}

// Returns the averages by parameter, undefined where there is none. If no rank used a parameter,
// each rank keeps the gradient that it had; so do parameters unfrozen too late for this step's
// buckets.
std::vector<at::Tensor> Reducer::averages() const {
  std::vector<at::Tensor> grads(params_.size());
  std::vector<int64_t> counts;  // read if this rank has missed a gradient
  const std::vector<bool>& mine = log_.used();
  for (size_t i = 0; i < params_.size(); ++i) {
    const at::Tensor& grad = params_[i]->tensor.grad();
    if (!planned_[i] || !is_whole(grad)) continue;
    const bool used_here = i < mine.size() && mine[i];
    if (!used_here && counts.empty()) counts = used_counts();
    if (used_here || (i < counts.size() && counts[i] > 0)) grads[i] = grad;
  }
  return grads;
}

std::vector<int64_t> Reducer::replica_digests() const {
  const Lock lock(mutex_);
  std::vector<at::Tensor> held;
  held.reserve(2 * params_.size());
  for (const auto& param : params_) held.push_back(param->tensor);
  for (at::Tensor& grad : averages()) held.push_back(std::move(grad));
  return ops::digests(held);
}

std::vector<int64_t> Reducer::accumulated() const {
  const Lock lock(mutex_);
  std::vector<int64_t> found;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i]->used && params_[i]->tensor.grad().defined()) {
      found.push_back(static_cast<int64_t>(i));
    }
  }
  return found;
}

std::vector<int64_t> Reducer::averaged() const {
  const Lock lock(mutex_);
  std::vector<int64_t> found;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (stats_.steps > 0 && planned_[i] && !params_[i]->used) {
      found.push_back(static_cast<int64_t>(i));
    }
  }
  return found;
}

// Takes the digests of replica_digests().
bool Reducer::are_alike(const std::vector<int64_t>& digests) {
  std::vector<std::vector<int64_t>> in_set(replicas_.ranks.size());
  for (size_t i = 0; i < digests.size(); ++i) {
    in_set[replicas_.of[i % params_.size()]].push_back(digests[i]);
  }
  std::vector<bool> bits(in_set.size() * kDigestBits);
  for (size_t set = 0; set < in_set.size(); ++set) {
    if (in_set[set].empty()) continue;
    const auto digest = static_cast<uint64_t>(ops::digest_of(in_set[set]));
    for (size_t i = 0; i < kDigestBits; ++i) bits[set * kDigestBits + i] = (digest >> i) % 2 == 1;
  }
  FlagExchange& exchange = exchange_in(alike_);
  exchange.abandon();  // a comparison that an error has ended
  exchange.start(bits, params_.front()->tensor.device());
  log_.progress()->issue();
  exchange.wait([&](comm::InFlight& sum) {
    await_last_issued(sum, Phase::kComparing, "the comparison of what all ranks should have");
  });
  const std::vector<int64_t> counts = exchange.counts();
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] != 0 && counts[i] != replicas_.ranks[i / kDigestBits]) return false;
  }
  return true;
}

// At the end of a step, on all ranks.
void Reducer::compare() {
  std::function<void(std::vector<int64_t>)> differ;
  std::vector<int64_t> digests;
  {
    const Lock lock(mutex_);
    const at::NoGradGuard no_grad;
    if (routes_.group->size() == 1) return;
    digests = replica_digests();
    if (are_alike(digests)) return;
    differ = differ_;
  }
  differ(std::move(digests));
}

// -- deaths of other ranks: see survival.h --

namespace {

// Releases the lock while Python meets or plans: other Python threads may query the reducer.
class Unlocked {
 public:
  explicit Unlocked(UniqueLock& lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() { lock_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  UniqueLock& lock_;
};

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "";
  }
}

}  // namespace

void Reducer::survive(Survivors survivors) {
  const Lock lock(mutex_);
  survival_ = std::make_unique<Survival>(params_);
  survival_->survivors = std::move(survivors);
  routes_.group->let_host_wait(survival_->survivors.timeout);
}

// Before the bucket is packed.
void Reducer::keep(const Bucket& bucket) {
  bucket.wait_for_producers();
  for (size_t i = 0; i < bucket.slots().size(); ++i) {
    const Slot& slot = bucket.slots()[i];
    if (!slot.early) survival_->own.keep(slot.index, bucket.transport().lives_here(i));
  }
}

// Whether the gradient may be packed ahead of its bucket. A gradient that lives in the bucket is
// copied with the others.
bool Reducer::may_take_early(const Bucket& bucket, size_t slot) {
  if (!survival_) return true;
  if (is_broken() || bucket.transport().lives_here(slot)) return false;
  survival_->own.keep(bucket.slots()[slot].index, false);
  return true;
}

// After an error the step goes on without sending; its end handles the error.
void Reducer::send(Bucket& bucket) {
  if (!survival_) return launch(bucket);
  try {
    keep(bucket);
    launch(bucket);
  } catch (...) {
    survival_->fault = std::current_exception();
  }
}

bool Reducer::is_broken() const { return survival_ && survival_->fault; }

// Under `lock`. Returns once this rank may use the averages of the running step. True: they contain
// gradients of ranks that are gone, and the survivors have yet to rebuild.
bool Reducer::agree_on_averages(UniqueLock& lock) {
  survival_->own.note_used();
  while (true) {
    try {
      if (is_broken()) std::rethrow_exception(survival_->fault);
      receive_all();
      vote();
      return false;
    } catch (...) {
      survival_->fault = std::current_exception();
    }
    const bool takes = meet(lock);
    if (survival_->vote) survival_->vote->abandon();
    survival_->fault = nullptr;
    survival_->complete = false;
    if (takes) return true;
    average_again(lock);
  }
}

void Reducer::receive_all() {
  if (!communicates()) return;
  const auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < plan_.buckets.size(); ++i) {
    if (plan_.buckets[i].state() != BucketState::kInFlight) continue;
    await(i);
    try {
      plan_.buckets[i].receive();
    } catch (const std::exception& error) {
      fail(i, "receiving", error.what());
    }
  }
  stats_.exposed_seconds +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void Reducer::vote() {
  if (!communicates() || plan_.buckets.empty()) return;
  survival_->complete = true;
  FlagExchange& vote = exchange_in(survival_->vote);
  vote.start({true}, at::kCPU);
  log_.progress()->issue();
  const auto label = concat("the vote that ends step ", stats_.steps + 1);
  vote.wait([&](comm::InFlight& all) { await_last_issued(all, Phase::kWaiting, label); });
}

// Whether the survivors take the averages that they have. Rethrows the error if no rank has died.
bool Reducer::meet(UniqueLock& lock) {
  const std::exception_ptr fault = survival_->fault;
  if (!faults_ || faults_->is_interrupted()) std::rethrow_exception(fault);
  const auto meet = survival_->survivors.meet;
  const int64_t steps = this->steps();
  const bool complete = survival_->complete;
  log_.progress()->reach(Phase::kPlanning);
  int64_t verdict = 0;
  {
    const Unlocked unlocked(lock);
    verdict = meet(steps, complete, text_of(fault));
  }
  if (static_cast<Verdict>(verdict) == Verdict::kFails) std::rethrow_exception(fault);
  return static_cast<Verdict>(verdict) == Verdict::kTake;
}

void Reducer::average_again(UniqueLock& lock) {
  abandon();  // collectives may still write to abandoned buffers
  survival_->own.restore_gradients();
  rebuild(lock);
  survival_->own.restore_used();
  backward_running_ = true;
  counts_.clear();
  for (Bucket& bucket : plan_.buckets) bucket.transport().begin();
  close_buckets();
}

void Reducer::rebuild(UniqueLock& lock) {
  const auto rebuild = survival_->survivors.rebuild;
  {
    const Unlocked unlocked(lock);
    rebuild();
  }
  log_.restart_timing();
}

// At the end of a step.
void Reducer::forget_own() {
  if (!survival_) return;
  survival_->own.drop();
  survival_->fault = nullptr;
  survival_->complete = false;
}

// A single rank sends nothing, and its buckets scale nothing.
void Reducer::scale_alone() {
  if (communicates()) return;
  weigh();
  if (!survival_ && !weighed_ && groups_.empty()) return;
  const at::NoGradGuard no_grad;
  for (const Bucket& bucket : plan_.buckets) {
    const ops::Scale scale = packing(bucket.group()).scale;
    if (scale.is_one()) continue;
    for (const Slot& slot : bucket.slots()) {
      const at::Tensor& grad = slot.grad();
      if (!slot.param->used || !grad.defined()) continue;
      if (scale.tensor.defined()) {
        grad.mul_(scale.tensor);
      } else {
        grad.mul_(scale.value);
      }
    }
  }
}

void OwnGradients::keep(size_t param, bool in_bucket) {
  const at::Tensor& grad = params_[param]->tensor.grad();
  if (!grad.defined()) return;
  const at::NoGradGuard no_grad;
  grads_[param] = in_bucket ? ops::copy_of(grad) : grad;
}

void OwnGradients::note_used() {
  used_.clear();
  for (const auto& param : params_) used_.push_back(param->used);
}

void OwnGradients::restore_gradients() const {
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!grads_[i].defined()) continue;
    // Allocated on the backward's stream, read on this one. Its contents are ready: at the end of
    // a backward, the current stream waits for all streams of the backward.
    ops::record_here(grads_[i]);
    params_[i]->tensor.mutable_grad() = grads_[i];
  }
}

void OwnGradients::restore_used() const {
  for (size_t i = 0; i < used_.size(); ++i) params_[i]->used = used_[i];
}

void OwnGradients::drop() { std::fill(grads_.begin(), grads_.end(), at::Tensor()); }

}  // namespace fastsync::engine
