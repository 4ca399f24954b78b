#include "sparse.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>

#include <utility>

#include "../check.h"
#include "../ops/buffers.h"

namespace fastsync::engine {
namespace {

// No rows of a sparse gradient: indices along the first dimension, dense after it, as embeddings have them. Backends
// exchange indices and values as they are, so all ranks must have them in one form.
at::Tensor empty_rows(const Parameter& param) {
  std::vector<int64_t> row = param.tensor.sizes().vec();
  row.front() = 0;
  const at::Device device = param.tensor.device();
  const at::Tensor indices = ops::make_scratch({1, 0}, at::kLong, device);
  const at::Tensor values = ops::make_scratch(row, param.dtype(), device);
  return at::_sparse_coo_tensor_unsafe(indices, values, param.tensor.sizes())._coalesced_(true);
}

class Sparse final : public Transport {
 public:
  Sparse(Slots& slots, std::unique_ptr<Flat> dense, SendRows send)
      : slots_(slots), dense_(std::move(dense)), send_(std::move(send)) {}

  void take(size_t /*slot*/, const Packing& /*how*/) override {}
  bool takes_once() const override { return false; }

  // A rank without a gradient takes part with an empty one.
  void pack(const Packing& how) override {
    const at::NoGradGuard no_grad;
    const Parameter& param = *slots_.front().param;
    const at::Tensor& grad = slots_.front().grad();
    is_dense_ = grad.defined() && !grad.is_sparse();
    if (is_dense_) return dense_->pack(how);
    rows_ = empty_rows(param);
    if (!grad.defined()) return;
    const double scale = is_users() ? 1.0 : how.scale;
    rows_ = grad.to(param.dtype()).mul(scale).coalesce();
  }

  std::unique_ptr<comm::InFlight> launch() override {
    return is_dense_ ? dense_->launch() : send_(rows_);
  }

  void receive(const at::Tensor& result) override {
    if (is_dense_) return dense_->receive(result);
    if (!result.defined()) return;
    FS_CHECK(result.sizes() == rows_.sizes(), "the communication hook returned ", result.sizes(),
             " for the sparse gradient of parameter '", slots_.front().param->name, "', which is ",
             rows_.sizes());
    rows_ = result.detach();
  }

  void deliver(const std::vector<bool>& used) override {
    if (is_dense_) return dense_->deliver(used);
    const at::Tensor sum = std::exchange(rows_, at::Tensor());
    const Parameter& param = *slots_.front().param;
    const bool by_anyone = param.used || !sum.is_sparse() || sum._nnz() > 0;
    if (by_anyone) param.tensor.mutable_grad() = sum;
  }

  void abandon(bool in_flight) override {
    dense_->abandon(in_flight);
    rows_ = at::Tensor();
  }

  Shadow shadow(uint64_t /*step*/) override {
    const at::NoGradGuard no_grad;
    return Shadow{send_(empty_rows(*slots_.front().param)), [] { return at::Tensor(); }};
  }

  bool is_users() const override { return dense_->is_users(); }
  bool has_flags() const override { return is_dense_ && dense_->has_flags(); }
  at::Tensor flags() const override { return dense_->flags(); }
  at::Tensor vote() const override { return is_dense_ ? dense_->vote() : at::Tensor(); }
  int64_t bytes() const override { return dense_->bytes(); }
  int64_t sent_bytes() const override { return dense_->sent_bytes(); }

 private:
  Slots& slots_;
  std::unique_ptr<Flat> dense_;
  SendRows send_;
  bool is_dense_ = false;  // the gradient of this step
  at::Tensor rows_;
};

}  // namespace

std::unique_ptr<Transport> make_sparse(Slots& slots, std::unique_ptr<Flat> dense, SendRows send) {
  return std::make_unique<Sparse>(slots, std::move(dense), std::move(send));
}

}  // namespace fastsync::engine
