#include "reducer/reducer.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "check.h"

namespace fastsync::engine {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

// Returns a number of its own for each reducer of this process.
int64_t next_number() {
  static std::atomic<int64_t> made{0};
  return ++made;
}

std::optional<c10::Stream> stream_of(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return std::nullopt;
  return c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
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
      usage_(params_, routes_.group->rank(), options.static_graph, options.fail_on_unused) {
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
  usage_.set_static_graph();
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
  for (const size_t i : weighing_.begin_backward(accumulated)) params_.at(i)->used = true;
}

// Under the lock. Runs inside a backward, whose final callback ends the step.
void Reducer::begin_backward() {
  open_step();
  const auto running = std::make_shared<int>();
  running_ = running;
  end_backward_by(Ending::kSend, &Reducer::close_backward, running);
  end_backward_by(Ending::kWait, &Reducer::finish_backward, running);
}

void Reducer::open_step() {
  backward_running_ = true;
  skipping_ = weighed_ = false;
  forget_own();
  counts_.clear();
  log_.begin_backward();
  if (weighing_.start) weighing_.start(backwards_);
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

// See [Note: the end of a backward]. `running` lives as long as the backward.
void Reducer::end_backward_by(Ending ending, void (Reducer::*step)(int64_t),
                              const std::shared_ptr<void>& running) {
  const std::weak_ptr<Reducer> weak = weak_from_this();
  at_end_of_backward({ending, number_}, [weak, step, running, mine = generation_] {
    if (const auto self = weak.lock()) ((*self).*step)(mine);
  });
}

// A parameter that autograd reached without a gradient counts as unused, but only where that is no
// mistake.
void Reducer::on_grad_ready(size_t param, bool defined) {
  const Lock lock(mutex_);
  if (defined || options_.fail_on_unused || options_.static_graph) params_[param]->used = true;
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
  how.scale = weighed_ ? scale_ : ops::Scale(1.0 / divisors_[group]);
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
  if (timed) done = rate_.timed(bucket.gradient_bytes(), std::move(done));
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
  std::unique_lock<std::recursive_mutex> lock(mutex_);
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
  const std::string change = usage_.find_change(planned_, log_.used());
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
  for (const auto& param : params_) param->used = false;
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

}  // namespace fastsync::engine
