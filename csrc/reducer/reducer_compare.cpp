// Compares parameters and averages between ranks, bit for bit.
//
// [Note: comparing costs no Python]
// Each rank digests its parameters and averages where they lie, in one pass. The digest of these
// digests is one number of 64 bits, whose bits are summed up over the ranks like used flags. If the
// ranks are alike, each bit is set on all ranks or on none. All ranks see the same sums and draw
// the same conclusion, however many they are. Python is only called if they differ. It gets the
// digests of single tensors as they were compared; memory may have changed since.
//
// All this happens before backward() returns. A sum that travelled with the next step's gradients
// would cost no wait. But by then the optimizer would have stepped, perhaps on a wrong average.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "check.h"
#include "ops/digests.h"
#include "reducer/reducer.h"

namespace fastsync::engine {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;

constexpr size_t kDigestBits = 64;

// Whether this rank has all elements. The gradients of ZeRO, of a class of their own, are sharded
// over the ranks.
bool is_whole(const at::Tensor& grad) {
  return grad.defined() && !grad.unsafeGetTensorImpl()->is_python_dispatch() &&
         grad.layout() == at::kStrided;
}

}  // namespace

void Reducer::compare_every(int64_t steps, std::function<void(std::vector<int64_t>)> differ) {
  const Lock lock(mutex_);
  FS_CHECK_VALUE(steps > 0, "nothing can be compared every ", steps, " steps");
  compared_every_ = steps;
  differ_ = std::move(differ);
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

bool Reducer::are_alike(int64_t digest) {
  if (!alike_) {
    const auto& group = routes_.memory ? routes_.memory : routes_.group;
    alike_ = std::make_unique<FlagExchange>(group, /*own=*/false);
  }
  std::vector<bool> bits(kDigestBits);
  for (size_t i = 0; i < kDigestBits; ++i) bits[i] = (static_cast<uint64_t>(digest) >> i) % 2 == 1;
  alike_->abandon();  // a comparison that an error has ended
  alike_->start(bits, params_.front()->tensor.device());
  log_.progress()->issue();
  alike_->wait([&](comm::InFlight& sum) {
    await_last_issued(sum, Phase::kComparing, "the comparison of what all ranks should have");
  });
  const std::vector<int64_t> ranks = alike_->counts();
  const int64_t all = routes_.group->size();
  return std::all_of(ranks.begin(), ranks.end(),
                     [all](int64_t count) { return count == 0 || count == all; });
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
    if (are_alike(ops::digest_of(digests))) return;
    differ = differ_;
  }
  differ(std::move(digests));
}

}  // namespace fastsync::engine
