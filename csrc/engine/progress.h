// Where a model's training stands on this rank, for whoever wants to say so while the rank cannot.
//
// The thread that trains writes, a thread that watches reads. Each value is stored by itself and
// relaxed, so writing costs a plain store; a reader may see a step's number beside the phase of the
// one before.
#pragma once

#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace fastsync::engine {

enum class Phase : int64_t {
  kBetweenSteps,
  kForward,
  kAfterForward,
  kBackward,
  kWrapping,
  kWaiting,  // for a bucket
  kMeeting,  // the other ranks, to change the plan
  kPlanning,
  kGathering,  // parameters that an optimizer has stepped on
  kGatheringUnit,
  kReducingUnit,
  kComparing,  // what all ranks should have
  kTogether,   // waiting where Python brings all ranks together
};

// A copy.
struct Standing {
  int64_t step = 0;    // synchronised steps made so far
  int64_t phase = 0;   // of `Phase`
  int64_t bucket = 0;  // sent in this step; while waiting, the one, or the unit, that is waited for
  int64_t buckets = 0;  // of the plan; 0 where there are units
  int64_t param = -1;   // whose gradient came last; -1: none in this step
  int64_t issued =
      0;  // collectives of this model, ever: the same ones in the same order on every rank
  int64_t coding = 0;     // milliseconds that a codec of the user's has been at work; 0: none is
  int64_t evaluated = 0;  // of units: see Evaluated
};

// How many of a rank's first collectives belong to evaluations: forwards without gradients of
// parameters that are trained. One word, so that a reader never sees one number beside the other of
// a moment ago.
struct Evaluated {
  uint32_t issued = 0;  // so many collectives, of which
  uint32_t count = 0;   // so many

  static Evaluated of(int64_t word) {
    const auto bits = static_cast<uint64_t>(word);
    return {static_cast<uint32_t>(bits >> 32U), static_cast<uint32_t>(bits)};
  }
  int64_t word() const { return static_cast<int64_t>(uint64_t{issued} << 32U | count); }
};

class Progress {
 public:
  // While it lives, a codec of the user's is at work on this thread. One at a time.
  class Coding {
   public:
    explicit Coding(Progress& progress) : progress_(progress) {
      progress_.coder_.store(pthread_self(), std::memory_order_relaxed);
      progress_.set(kCodingSince, clock_now());
    }
    ~Coding() { progress_.set(kCodingSince, 0); }
    Coding(const Coding&) = delete;
    Coding& operator=(const Coding&) = delete;

   private:
    Progress& progress_;
  };

  Standing now() const {
    return {get(kStep),  get(kPhase),  get(kBucket), get(kBuckets),
            get(kParam), get(kIssued), coding(),     get(kEvaluated)};
  }
  // The thread on which a codec was last at work.
  pthread_t coder() const { return coder_.load(std::memory_order_relaxed); }

  void reach(Phase phase) { set(kPhase, static_cast<int64_t>(phase)); }
  void count_steps(int64_t steps) { set(kStep, steps); }
  void begin_backward() {
    reach(Phase::kBackward);
    set(kBucket, 0);
    set(kParam, -1);
    before_ = get(kIssued);
  }
  void arrived(size_t param) { set(kParam, static_cast<int64_t>(param)); }
  void sent(int64_t buckets) {
    reach(Phase::kBackward);  // again, where it had waited for an earlier one
    set(kBucket, buckets);
    issue();
  }
  void issue() { set(kIssued, get(kIssued) + 1); }
  // One of units; `evaluates`: in an evaluation.
  void issue_of_units(bool evaluates) {
    issue();
    const Evaluated before = Evaluated::of(get(kEvaluated));
    const Evaluated now{before.issued + 1, before.count + (evaluates ? 1U : 0U)};
    history_[now.issued % kHistory].store(now.word(), std::memory_order_relaxed);
    set(kEvaluated, now.word());
  }
  // How many of so many belonged to evaluations. Negative: not known, or not any more.
  int64_t evaluated_of(uint32_t issued) const {
    const auto& kept = history_[issued % kHistory];
    const Evaluated found = Evaluated::of(kept.load(std::memory_order_relaxed));
    return issued > 0 && found.issued == issued ? static_cast<int64_t>(found.count) : -1;
  }
  // It has failed, so that this rank is where it was before.
  void take_back() { set(kIssued, get(kIssued) - 1); }
  void await(int64_t index, Phase phase = Phase::kWaiting) {
    reach(phase);
    set(kBucket, index);
  }
  void plan(int64_t buckets) {
    set(kBuckets, buckets);
    if (get(kPhase) == static_cast<int64_t>(Phase::kMeeting)) reach(Phase::kForward);
  }

  // How many collectives a rank has issued that has sent so many buckets of this step, at most.
  int64_t issued_with(int64_t buckets) const {
    const int64_t all = get(kIssued);
    return before_ + buckets < all ? before_ + buckets : all;
  }
  int64_t issued() const { return get(kIssued); }
  // Other ranks count with this one from now on.
  void restart() {
    set(kIssued, 0);
    before_ = 0;
  }

 private:
  enum Field {
    kStep,
    kPhase,
    kBucket,
    kBuckets,
    kParam,
    kIssued,
    kCodingSince,
    kEvaluated,
    kFields
  };
  static constexpr size_t kHistory = 512;

  int64_t get(Field field) const { return values_[field].load(std::memory_order_relaxed); }
  void set(Field field, int64_t value) { values_[field].store(value, std::memory_order_relaxed); }

  static int64_t clock_now() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::milliseconds>(since).count();
  }
  int64_t coding() const {
    const int64_t since = get(kCodingSince);
    return since == 0 ? 0 : clock_now() - since;
  }

  std::array<std::atomic<int64_t>, kFields> values_{};
  std::atomic<pthread_t> coder_{};
  int64_t before_ = 0;  // issued before this step; the writer's own
  std::array<std::atomic<int64_t>, kHistory> history_{};  // of Evaluated, by digits of `issued`
};

}  // namespace fastsync::engine
