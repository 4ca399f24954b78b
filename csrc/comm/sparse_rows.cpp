#include "sparse_rows.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "../ops/buffers.h"

namespace fastsync::comm {
namespace {

constexpr int64_t kDense = -1;  // in place of a number of rows

class RowsInFlight final : public CalledByWait<> {
 public:
  RowsInFlight(const at::Tensor& rows, SendDense dense, int64_t ranks, GatherRows gather)
      : rows_(rows),
        dense_(std::move(dense)),
        counts_(ops::make_scratch({ranks}, at::kLong, at::kCPU)),
        gather_(std::move(gather)) {
    const at::Tensor count = ops::make_zeros({1}, at::kLong, at::kCPU);
    *count.mutable_data_ptr<int64_t>() = rows.defined() ? rows.indices().size(1) : kDense;
    counting_ = gather_(counts_, count);
  }

  at::Tensor wait() override {
    const at::NoGradGuard no_grad;
    counting_->wait();
    const int64_t* counts = counts_.const_data_ptr<int64_t>();
    const bool any_dense =
        std::find(counts, counts + counts_.numel(), kDense) != counts + counts_.numel();
    const at::Tensor sum = any_dense ? dense_()->wait() : sum_of_rows(counts);
    call();
    return sum;
  }

 private:
  at::Tensor sum_of_rows(const int64_t* counts) const {
    const int64_t most = *std::max_element(counts, counts + counts_.numel());
    if (most == 0) return rows_;
    const at::Tensor positions = everyones(rows_.indices().t(), counts, most).t();
    const at::Tensor values = everyones(rows_.values(), counts, most);
    return at::_sparse_coo_tensor_unsafe(positions, values, rows_.sizes()).coalesce();
  }

  // Along the first dimension, rank by rank.
  at::Tensor everyones(const at::Tensor& mine, const int64_t* counts, int64_t most) const {
    std::vector<int64_t> sizes = mine.sizes().vec();
    sizes.front() = most;
    const at::Tensor padded = ops::make_zeros(sizes, mine.scalar_type(), mine.device());
    padded.narrow(0, 0, mine.size(0)).copy_(mine);
    sizes.front() = most * counts_.numel();
    const at::Tensor gathered = ops::make_scratch(sizes, mine.scalar_type(), mine.device());
    gather_(gathered, padded)->wait();
    std::vector<at::Tensor> parts;
    for (int64_t r = 0; r < counts_.numel(); ++r) {
      parts.push_back(gathered.narrow(0, r * most, counts[r]));
    }
    return at::cat(parts);
  }

  at::Tensor rows_;
  SendDense dense_;
  at::Tensor counts_;
  GatherRows gather_;
  std::unique_ptr<InFlight> counting_;
};

}  // namespace

std::unique_ptr<InFlight> sum_sparse_rows(const at::Tensor& rows, SendDense dense, int64_t ranks,
                                          GatherRows gather) {
  return std::make_unique<RowsInFlight>(rows, std::move(dense), ranks, std::move(gather));
}

}  // namespace fastsync::comm
