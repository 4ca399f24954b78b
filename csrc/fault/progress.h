// The progress of a model's training on this rank, for reports while the training thread is
// blocked.
//
// The training thread writes, a watching thread reads. Each value is stored by itself, with relaxed
// order, so writing costs a plain store; a reader may see a step's number beside the phase of the
// step before.
#pragma once

#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

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
  kTogether,   // waiting in a place where Python brings all ranks together
};

// A copy of the progress.
struct ProgressSnapshot {
  int64_t step = 0;     // synchronised steps made so far
  int64_t phase = 0;    // of `Phase`
  int64_t bucket = 0;   // sent in this step; while waiting, the awaited bucket or unit
  int64_t buckets = 0;  // of the plan; 0 with units
  int64_t param = -1;   // whose gradient arrived last; -1: none in this step
  // Collectives of this model so far: the same ones in the same order on every rank.
  int64_t issued = 0;
  int64_t coding = 0;  // milliseconds for which a codec of the user has been running; 0: none is
  int64_t kinds = 0;   // see Kinds
};

// How many of a rank's first collectives are of which kind, and which they are. Packed into one
// word, so that a reader never sees numbers of different moments. Numbers that overflow begin at 0.
struct Kinds {
  uint32_t issued = 0;      // 24 bits: collectives, of which
  uint8_t evaluations = 0;  // belong to forwards without gradients of parameters that are trained
  uint8_t backwards = 0;    // belong to backwards
  uint32_t digest = 0;      // 24 bits: of what they are about, in their order

  static constexpr uint32_t kMask = 0xFFFFFF;
  static Kinds of(int64_t word) {
    const auto bits = static_cast<uint64_t>(word);
    return {static_cast<uint32_t>(bits >> 40U), static_cast<uint8_t>(bits >> 32U),
            static_cast<uint8_t>(bits >> 24U), static_cast<uint32_t>(bits) & kMask};
  }
  int64_t word() const {
    return static_cast<int64_t>(uint64_t{issued} << 40U | uint64_t{evaluations} << 32U |
                                uint64_t{backwards} << 24U | digest);
  }
};

class Progress {
 public:
  // Marks a codec of the user as running on this thread while it lives. One at a time.
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

  ProgressSnapshot now() const {
    return {get(kStep),  get(kPhase),  get(kBucket), get(kBuckets),
            get(kParam), get(kIssued), coding(),     get(kKinds)};
  }
  // Returns the thread on which a codec ran last.
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
    reach(Phase::kBackward);  // again, if it has waited for an earlier one
    set(kBucket, buckets);
    issue_of_kind(/*evaluates=*/false, /*in_backward=*/true, /*about=*/0);
  }
  void issue() { set(kIssued, get(kIssued) + 1); }
  // Counts a collective by its kind, too: in a forward that evaluates, in a backward, or neither.
  // `about`: a number of what it is, the same on all ranks.
  void issue_of_kind(bool evaluates, bool in_backward, int64_t about) {
    issue();
    if (restarted_) return;
    Kinds kinds = Kinds::of(get(kKinds));
    kinds.issued = (kinds.issued + 1) & Kinds::kMask;
    kinds.evaluations = static_cast<uint8_t>(kinds.evaluations + (evaluates ? 1 : 0));
    kinds.backwards = static_cast<uint8_t>(kinds.backwards + (in_backward ? 1 : 0));
    // Multiplicative hashing: Knuth, The Art of Computer Programming, vol. 3, section 6.4.
    kinds.digest = (kinds.digest * 10368889U + static_cast<uint32_t>(about)) & Kinds::kMask;
    history_[kinds.issued % kHistory].store(kinds.word(), std::memory_order_relaxed);
    set(kKinds, kinds.word());
  }
  // Returns the kinds of the first `issued` collectives; nothing where they are not known, or no
  // longer.
  std::optional<Kinds> kinds_of(uint32_t issued) const {
    const auto& kept = history_[issued % kHistory];
    const Kinds found = Kinds::of(kept.load(std::memory_order_relaxed));
    if (issued == 0 || found.issued != issued) return std::nullopt;
    return found;
  }
  // Takes the last issue() back: the collective has failed.
  void take_back() { set(kIssued, get(kIssued) - 1); }
  void await(int64_t index, Phase phase = Phase::kWaiting) {
    reach(phase);
    set(kBucket, index);
  }
  void plan(int64_t buckets) {
    set(kBuckets, buckets);
    if (get(kPhase) == static_cast<int64_t>(Phase::kMeeting)) reach(Phase::kForward);
  }

  // Returns the number of collectives that a rank has issued, at most, once it has sent `buckets`
  // buckets of this step.
  int64_t issued_with(int64_t buckets) const {
    const int64_t all = get(kIssued);
    return before_ + buckets < all ? before_ + buckets : all;
  }
  int64_t issued() const { return get(kIssued); }
  // Starts the count anew, together with the ranks of a new group.
  void restart() {
    set(kIssued, 0);
    before_ = 0;
    // What others said of kinds before would be compared with what comes now.
    restarted_ = true;
    set(kKinds, 0);
    for (auto& kept : history_) kept.store(0, std::memory_order_relaxed);
  }

 private:
  enum Field { kStep, kPhase, kBucket, kBuckets, kParam, kIssued, kCodingSince, kKinds, kFields };
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
  int64_t before_ = 0;      // issued before this step; used by the writer alone
  bool restarted_ = false;  // likewise: kinds are counted no more
  std::array<std::atomic<int64_t>, kHistory> history_{};  // of Kinds, by `issued`
};

}  // namespace fastsync::engine
