// Watches whether the bucket plan still fits the order in which gradients arrive, and has all ranks
// agree on a new one.
//
// [Note: new plans]
// After the first synchronised step the ready order is known, and every rank asks for a new plan.
// Later a rank that sees buckets complete out of plan order, or parameters frozen, sets a vote that
// travels in the flags of the last bucket. Its sum is read some steps later: on the CPU at the end
// of the next one, on a device so late that the host, which runs ahead, does not wait for it. The
// sum is the same on all ranks, so all plan after the same step. Each vote that passes doubles the
// number of steps before the next one: if no plan fits, planning becomes rare.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

namespace fastsync::engine {

class PlanWatch {
 public:
  void plan_installed();
  // An earlier plan is back in use.
  void plan_restored();
  // The process group has changed: its ranks do not know the steps so far.
  void group_changed();

  void begin_step();
  void arrived(int64_t param) { order_.push_back(param); }
  void bucket_out_of_order() { out_of_order_ = true; }
  // `missing`: planned parameters without gradient in this step.
  void end_step(const std::vector<int64_t>& missing);
  // Ends a step of the other ranks, to which this rank contributed no gradients.
  void end_shadow_step();

  // Asks for a new plan because the plan holds parameters that are frozen now. That is harmless, so
  // the vote may wait.
  void wish();
  bool vote() const { return vote_; }
  // Takes the sum of this step's votes, on any device; undefined if there were none.
  void note_votes(const at::Tensor& sum);

  // At the end of a step: whether all ranks ask for a new plan now.
  bool replan_due();
  // Whether the plan was made from the order of a step.
  bool knows_order() const { return learned_; }
  // Parameters in the order of their gradients in the last step, missing ones last.
  const std::vector<int64_t>& ready_order() const { return last_order_; }

 private:
  struct Votes {
    bool passed = false;               // known at once on the CPU
    at::Tensor host;                   // elsewhere, the copy under way
    std::optional<c10::Event> copied;  // and the event after it
  };

  std::vector<int64_t> order_;
  std::vector<int64_t> last_order_;
  int64_t steps_ = 0;
  bool learned_ = false;  // the plan was made from an observed order
  bool out_of_order_ = false;
  int out_of_order_steps_ = 0;
  int64_t steps_since_plan_ = 0;
  int64_t backoff_ = 8;  // steps before the next vote
  bool vote_ = false;
  std::array<Votes, 8> votes_;  // of the last steps
  int64_t read_after_ = 1;      // steps until a vote is read
};

}  // namespace fastsync::engine
