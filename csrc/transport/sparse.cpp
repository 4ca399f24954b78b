// Transport of one parameter whose gradient may be a sparse tensor: it travels alone, coalesced,
// its used flag and the vote after it in a collective of their own. If the gradient of any rank is
// dense, all ranks send a dense one, and get one.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>

#include <utility>

#include "../check.h"
#include "transports.h"

namespace fastsync::engine {
namespace {

// Returns a sparse gradient without rows: indices along the first dimension, dense after it, as
// embeddings have them. Backends exchange indices and values as they are, so all ranks must have
// them in one form.
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
  Sparse(Slots& slots, std::unique_ptr<Flat> dense, SendRows send,
         std::shared_ptr<comm::Collective> flags_group)
      : slots_(slots),
        dense_(std::move(dense)),
        send_(std::move(send)),
        flags_group_(std::move(flags_group)) {}

  void take(size_t /*slot*/, const Packing& /*how*/) override {}
  bool takes_once() const override { return false; }

  // A rank without a gradient takes part with an empty one.
  void pack(const Packing& how) override {
    const at::NoGradGuard no_grad;
    const Parameter& param = *slots_.front().param;
    const at::Tensor& grad = slots_.front().grad();
    how_ = how;
    is_dense_ = false;
    flags_ = flags(used_flag(slots_.front()), how.vote);
    if (flags_.defined()) add_to_first(flags_, how.infinities);
    rows_ = at::Tensor();
    if (!grad.defined()) {
      rows_ = empty_rows(param);
    } else if (grad.is_sparse()) {
      const at::Tensor rows = grad.to(param.dtype());
      const ops::Scale& by = how.scale;
      rows_ = (by.tensor.defined() ? rows.mul(by.tensor) : rows.mul(by.value)).coalesce();
    }
  }

  std::unique_ptr<comm::InFlight> launch() override {
    return send(rows_, [this] { return launch_dense(); }, flags_);
  }

  void receive(const at::Tensor& result) override {
    if (is_dense_) return dense_->receive(result);
    if (!result.defined()) return;
    FS_CHECK(result.sizes() == rows_.sizes(), "the communication hook returned ", result.sizes(),
             " for the sparse gradient of parameter '", slots_.front().param->name, "', which is ",
             rows_.sizes());
    const at::Tensor& like = slots_.front().param->tensor;
    rows_ = result.detach().to(like.device(), slots_.front().param->dtype());
  }

  void deliver(const std::vector<bool>& used) override {
    if (is_dense_) return dense_->deliver(used);
    const at::Tensor sum = std::exchange(rows_, at::Tensor());
    if (used.front()) slots_.front().param->tensor.mutable_grad() = sum;
  }

  void abandon(bool in_flight) override {
    dense_->abandon(in_flight);
    rows_ = at::Tensor();
    if (in_flight) flags_ = at::Tensor();
  }

  Shadow shadow(uint64_t step) override {
    const at::NoGradGuard no_grad;
    const at::Tensor none = flags(/*used=*/0.0F, /*vote=*/false);
    const auto dense = [this, step] { return dense_->shadow(step).in_flight; };
    auto in_flight = send(empty_rows(*slots_.front().param), dense, none);
    return Shadow{std::move(in_flight), [this, none] { return vote_in(none); }};
  }

  bool is_users() const override { return dense_->is_users(); }
  bool has_flags() const override { return flags_.defined(); }
  at::Tensor flags() const override { return flags_.narrow(0, 0, 1); }
  at::Tensor vote() const override { return vote_in(flags_); }
  int64_t bytes() const override { return dense_->bytes(); }
  int64_t sent_bytes() const override { return dense_->sent_bytes(); }

 private:
  // Returns this rank's used flag, then its vote.
  at::Tensor flags(float used, bool vote) const {
    if (!flags_group_) return {};
    return flags_on(slots_.front().param->tensor.device(), {used, vote ? 1.0F : 0.0F}, 2);
  }

  at::Tensor vote_in(const at::Tensor& flags) const {
    return flags.defined() ? flags.narrow(0, 1, 1) : at::Tensor();
  }

  std::unique_ptr<comm::InFlight> launch_dense() {
    const at::NoGradGuard no_grad;
    at::Tensor& grad = slots_.front().param->tensor.mutable_grad();
    if (grad.defined() && grad.is_sparse()) grad = grad.to_dense();
    is_dense_ = true;
    dense_->pack(how_);
    return dense_->launch();
  }

  std::unique_ptr<comm::InFlight> send(const at::Tensor& rows, comm::SendDense dense,
                                       const at::Tensor& flags) const {
    auto sent = send_(rows, std::move(dense));
    if (!flags_group_) return sent;
    std::vector<std::unique_ptr<comm::InFlight>> both;
    both.push_back(std::move(sent));
    both.push_back(flags_group_->all_reduce(flags));
    return comm::all_of(std::move(both));
  }

  Slots& slots_;
  std::unique_ptr<Flat> dense_;
  SendRows send_;
  std::shared_ptr<comm::Collective> flags_group_;
  Packing how_;
  bool is_dense_ = false;  // a gradient of this step, on any rank
  at::Tensor rows_;        // undefined if this rank's gradient is dense
  at::Tensor flags_;       // sums, after the step
};

}  // namespace

std::unique_ptr<Transport> make_sparse(Slots& slots, std::unique_ptr<Flat> dense, SendRows send,
                                       std::shared_ptr<comm::Collective> flags_group) {
  return std::make_unique<Sparse>(slots, std::move(dense), std::move(send), std::move(flags_group));
}

}  // namespace fastsync::engine
