// Transport of buckets whose averages only their owners keep (ZeRO, stages 1 and 2).
//
// [Note: regions]
// A unit is a set of parameters, laid out as fastsync/zero/partition.py says: one region per rank.
// Rank r receives all ranks' parts of region r and keeps the averages in its shard. A bucket
// carries members of one unit that are trained; how their parts reach their owners is in regions.h.
// The flags that travel with them are those of flat.h, and one more per slot that says whether the
// average is added to the gradient that was there before. Each rank sums them for itself.
//
// [Note: gradient proxies]
// After a backward a rank has no unsharded gradient that a script could read, so `param.grad`
// becomes a proxy: a tensor without memory, whose operations fastsync/zero/gradient_proxies.py
// implements. At the start of a backward proxies are taken off, so that autograd accumulates into
// tensors of its own; the averages behind the proxies count as accumulated before. A proxy that is
// still referenced keeps its values, as a gradient would: release() copies them before they are
// overwritten.
//
// [Note: squares]
// Clipping gradients by their norm needs the sum of their squares. From the first clip on, owners
// take it while they add up averages, block by block in the caches, so that the gradients need not
// be read once more. A sum is valid as long as the shard's version is the one that it was taken at:
// scripts reach averages only through proxies, whose operations raise the version. The plain twin
// is ops::square_sums(), which gives the same bits.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "regions.h"
#include "transport.h"

namespace fastsync::engine {

// See [Note: squares].
class SquareSums {
 public:
  // Takes sums from the next averages on.
  void want() { wanted_ = true; }
  bool wanted() const { return wanted_; }

  // The averages of a member are about to change.
  void forget(size_t member);
  // Takes the sums of members whose averages are new in `shard`, which was at version `before`
  // until then.
  void take(const at::Tensor& shard, uint32_t before, const std::vector<size_t>& members,
            const std::vector<double>& sums);
  // Returns the sum of a member; nothing if it is not known for the current values of `shard`.
  std::optional<double> of(const at::Tensor& shard, size_t member) const;

 private:
  bool wanted_ = false;
  uint32_t version_ = 0;                     // of the shard
  std::vector<std::optional<double>> sums_;  // by member
};

// A unit's gradients on this rank. Lives longer than a plan: buckets of several plans may carry
// them.
struct ShardedGradients {
  ShardedGradients(at::Tensor averages, std::vector<at::Tensor> members)
      : shard(std::move(averages)),
        params(std::move(members)),
        pending(params.size()),
        announced(params.size()) {}

  // Autograd is about to add a gradient to a member's proxy: `grad`, if nobody else has it;
  // undefined otherwise.
  void announce(size_t member, const at::Tensor& grad);
  // Accumulates a gradient of this rank. One that was announced is kept without a copy, as autograd
  // itself would.
  void add(size_t member, const at::Tensor& grad);

  at::Tensor shard;                 // [region], the averages
  std::vector<at::Tensor> params;   // by member
  std::vector<at::Tensor> proxies;  // likewise
  // Gradients that this rank alone has accumulated since, by member; undefined where there are
  // none.
  std::vector<at::Tensor> pending;
  std::vector<std::optional<c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>>>
      announced;  // by member
  SquareSums squares;
  // Whether a member's proxy is referenced elsewhere than by `param.grad`.
  std::function<bool(size_t)> is_held;
  // Makes another proxy, in `proxies`, and leaves the old one its values.
  std::function<void(size_t)> release;
  std::vector<std::shared_ptr<void>> hooks;  // which announce arrivals
};

using ShardedUnits = std::vector<std::shared_ptr<ShardedGradients>>;

// Sums of squares of the gradients of some parameters.
struct GradientSquares {
  double owned = 0.0;               // of elements that only this rank has
  double common = 0.0;              // of gradients that every rank has; the same bits everywhere
  bool wide = false;                // fp64 is among them
  std::vector<at::Tensor> tensors;  // that every rank has
  bool spread = false;              // some are sharded over the ranks
  bool all_spread = false;          // all that the units have
};

// Gradients that live in the buffer of one transport.
struct HeldGradients {
  std::vector<at::Tensor> gradients;
  const Transport* transport = nullptr;
};

// Returns the sums without a read of sharded gradients, or of those that a transport holds and has
// summed. Nothing if a sum over sharded ones is not known, if this rank has added to a gradient, or
// if one is neither a proxy of these units nor a plain tensor on a CPU.
std::optional<GradientSquares> known_squares(const std::vector<at::Tensor>& params,
                                             const ShardedUnits& units,
                                             const std::vector<HeldGradients>& held);

struct ScatterSpec {
  std::shared_ptr<ShardedGradients> gradients;
  std::vector<size_t> members;  // of the unit, by slot
  int64_t first = 0;            // element of the unit that this rank's region begins with
  RegionLayout layout;
  std::vector<RegionPart> parts;  // of the slots
};

// Slots' offsets are those in the unit. The slots must live longer.
std::unique_ptr<Transport> make_scattered(const ScatterSpec& spec, Slots& slots,
                                          std::unique_ptr<Regions> regions);

}  // namespace fastsync::engine
