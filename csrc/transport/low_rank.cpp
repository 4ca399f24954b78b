#include "low_rank.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "../ops/lossy_ops.h"
#include "../ops/ops.h"

namespace fastsync::engine {
namespace {

// Buffers and what is done to them: shared with collectives under way, which may outlive the bucket.
class Factors {
 public:
  Factors(const LowRankSpec& spec, int ranks, at::Device device)
      : spec_(spec), ranks_(ranks), device_(device) {
    const at::NoGradGuard no_grad;
    for (const LowRankSpec::Run& run : spec_.runs) {
      run_layouts_.push_back(ops::SlotLayout::run(run.place, run.numel));
    }
    flat_ = ops::make_flat(spec_.numel, at::kFloat, device);
    initial_ = ops::make_flat(spec_.second_numel, at::kFloat, device);
    draw(initial_, 0);
    if (spec_.error_feedback) residual_ = ops::make_flat(spec_.numel, at::kFloat, device);
    allocate();
  }

  // The same with buffers that no collective writes to, and the first Q again.
  std::shared_ptr<Factors> renewed() const {
    const at::NoGradGuard no_grad;
    auto fresh = std::make_shared<Factors>(*this);
    fresh->flat_ = ops::make_flat(flat_.numel(), at::kFloat, device_);
    if (residual_.defined()) fresh->residual_ = ops::copy_of(residual_);
    fresh->allocate();
    return fresh;
  }

  // After take(): `first` becomes P, and what is not compressed.
  void compress(uint64_t step) const {
    const at::NoGradGuard no_grad;
    if (residual_.defined()) take_residual();
    if (!spec_.warm_start) draw(second_, step);
    std::vector<ops::Vectors> rights;
    for (const LowRankSpec::Matrix& matrix : spec_.matrices) {
      rights.push_back({right_of(second_, matrix), right_of(initial_, matrix)});
    }
    ops::orthonormalise(rights);
    std::vector<ops::Projection> lefts;
    for (const LowRankSpec::Matrix& matrix : spec_.matrices) {
      lefts.push_back({matrix_in(flat_, matrix), right_of(second_, matrix), left_of(matrix)});
    }
    ops::project(kernels::Factor::kLeft, lefts);
    ops::pack(runs(), first_, 1.0);
  }

  // After the first all-reduce: `second` becomes Q.
  void project() const {
    const at::NoGradGuard no_grad;
    std::vector<ops::Vectors> lefts;
    for (const LowRankSpec::Matrix& matrix : spec_.matrices) {
      lefts.push_back({left_of(matrix), at::Tensor()});
    }
    ops::orthonormalise(lefts);
    std::vector<ops::Projection> rights;
    for (const LowRankSpec::Matrix& matrix : spec_.matrices) {
      rights.push_back({matrix_in(flat_, matrix), left_of(matrix), right_of(second_, matrix)});
    }
    ops::project(kernels::Factor::kRight, rights);
  }

  // After the second one: the flat buffer becomes the averages.
  void expand() const {
    const at::NoGradGuard no_grad;
    std::vector<ops::LowRankProduct> products;
    for (const LowRankSpec::Matrix& matrix : spec_.matrices) {
      const at::Tensor lost = residual_.defined() ? matrix_in(residual_, matrix) : at::Tensor();
      const bool asks = lost.defined() && spec_.flags > 0;
      products.push_back({left_of(matrix), right_of(second_, matrix), 1.0 / ranks_,
                          matrix_in(flat_, matrix), lost,
                          asks ? used_anywhere(matrix) : at::Tensor()});
    }
    ops::low_rank_product(products);
    ops::unpack(runs(), first_, 1.0, false);
  }

  void set_flags(const std::vector<float>& flags) const {
    const at::NoGradGuard no_grad;
    write_flags(flags, flags_in_first());
  }

  at::Tensor flags_in_first() const { return first_.narrow(0, spec_.flags_offset, spec_.flags); }

  // Q of the matrix at `offset`; undefined where none is kept.
  at::Tensor kept_right(int64_t offset) const { return right_at(offset, second_); }

  // undefined, or of other sizes: the first Q again
  void keep_right(int64_t offset, const at::Tensor& right) const {
    const at::NoGradGuard no_grad;
    const at::Tensor mine = right_at(offset, second_);
    const bool fits = right.defined() && right.sizes() == mine.sizes();
    mine.copy_(fits ? right : right_at(offset, initial_));
  }

  const LowRankSpec& spec() const { return spec_; }
  int ranks() const { return ranks_; }
  at::Device device() const { return device_; }
  const at::Tensor& flat() const { return flat_; }
  const at::Tensor& first() const { return first_; }
  const at::Tensor& second() const { return second_; }
  const at::Tensor& residual() const { return residual_; }

 private:
  void allocate() {
    first_ = ops::make_flat(spec_.first_numel, at::kFloat, device_);
    second_ = ops::copy_of(initial_);
  }

  // What is not compressed leaves nothing behind; what another codec left there travels once.
  void take_residual() const {
    flat_.add_(residual_);
    for (const LowRankSpec::Run& run : spec_.runs) {
      residual_.narrow(0, run.offset, run.numel).zero_();
    }
  }

  void draw(const at::Tensor& all, uint64_t step) const {
    std::vector<std::pair<at::Tensor, uint64_t>> runs;
    for (size_t i = 0; i < spec_.matrices.size(); ++i) {
      const uint64_t seed = spec_.seed + (static_cast<uint64_t>(i) << 32) + (step << 48);
      runs.emplace_back(right_of(all, spec_.matrices[i]), seed);
    }
    ops::fill_random(runs);
  }

  static at::Tensor matrix_in(const at::Tensor& flat, const LowRankSpec::Matrix& matrix) {
    const int64_t numel = matrix.rows * matrix.cols;
    return flat.narrow(0, matrix.offset, numel).view({matrix.rows, matrix.cols});
  }
  static at::Tensor right_of(const at::Tensor& all, const LowRankSpec::Matrix& matrix) {
    const int64_t numel = matrix.rank * matrix.cols;
    return all.narrow(0, matrix.right, numel).view({matrix.rank, matrix.cols});
  }
  // How many ranks have it, after the first all-reduce: [1].
  at::Tensor used_anywhere(const LowRankSpec::Matrix& matrix) const {
    const auto before = [&](const auto& other) { return other.offset < matrix.offset; };
    const auto empty = [&](const LowRankSpec::Run& run) {
      return run.offset == matrix.offset && run.numel == 0;
    };
    const auto slot = std::count_if(spec_.matrices.begin(), spec_.matrices.end(), before) +
                      std::count_if(spec_.runs.begin(), spec_.runs.end(), before) +
                      std::count_if(spec_.runs.begin(), spec_.runs.end(), empty);
    return flags_in_first().narrow(0, slot, 1);
  }
  at::Tensor right_at(int64_t offset, const at::Tensor& all) const {
    if (!spec_.warm_start) return {};
    const auto found = std::find_if(
        spec_.matrices.begin(), spec_.matrices.end(),
        [offset](const LowRankSpec::Matrix& matrix) { return matrix.offset == offset; });
    return found == spec_.matrices.end() ? at::Tensor() : right_of(all, *found);
  }
  at::Tensor left_of(const LowRankSpec::Matrix& matrix) const {
    const int64_t numel = matrix.rank * matrix.rows;
    return first_.narrow(0, matrix.left, numel).view({matrix.rank, matrix.rows});
  }

  // What is not compressed, in the flat buffer, with its places in the first all-reduce.
  std::vector<ops::Item> runs() const {
    std::vector<ops::Item> items;
    for (size_t i = 0; i < spec_.runs.size(); ++i) {
      const LowRankSpec::Run& run = spec_.runs[i];
      items.push_back({flat_.narrow(0, run.offset, run.numel), &run_layouts_[i]});
    }
    return items;
  }

  LowRankSpec spec_;
  int ranks_;
  at::Device device_;
  std::vector<ops::SlotLayout> run_layouts_;
  at::Tensor flat_;     // M, then the averages
  at::Tensor first_;    // P, then what is not compressed, flags and vote
  at::Tensor second_;   // Q, which the next step starts with
  at::Tensor initial_;  // the first Q
  at::Tensor residual_;
};

class LowRankLinks final : public comm::Links {
 public:
  LowRankLinks(std::shared_ptr<const Factors> factors, Delivery delivery)
      : factors_(std::move(factors)), delivery_(std::move(delivery)) {}

  size_t count() const override { return 2; }

  std::unique_ptr<comm::InFlight> start(size_t index, comm::Collective& group) override {
    if (index == 0) return group.all_reduce(factors_->first());
    if (index == 1) {
      factors_->project();
      return group.all_reduce(factors_->second());
    }
    factors_->expand();
    deliver();
    return nullptr;
  }

 private:
  void deliver() const {
    if (delivery_.tensors.empty()) return;
    ops::unpack(delivery_.items(), factors_->flat(), 1.0, false);
  }

  std::shared_ptr<const Factors> factors_;
  Delivery delivery_;
};

class LowRank final : public Coding {
 public:
  LowRank(const LowRankSpec& spec, int ranks, at::Device device)
      : factors_(std::make_shared<Factors>(spec, ranks, device)) {}

  void take(const std::vector<ops::Item>& items, Taking how) override {
    ops::pack(items, factors_->flat(), how.scale);
  }

  void pack(const std::vector<ops::Item>& items, const std::vector<float>& flags,
            Taking how) override {
    if (!items.empty()) take(items, how);
    factors_->compress(how.step + 1);
    if (has_flags()) factors_->set_flags(flags);
  }

  bool works_on_parts() const override { return true; }

  std::unique_ptr<comm::InFlight> launch(comm::Chains& chains, Delivery delivery) override {
    auto links = std::make_shared<LowRankLinks>(factors_, std::move(delivery));
    return chains.run(std::move(links), factors_->device());
  }

  void unpack(const std::vector<ops::Item>& items) override {
    if (!items.empty()) ops::unpack(items, factors_->flat(), 1.0, false);
  }

  bool has_flags() const override { return factors_->spec().flags > 0; }
  at::Tensor flags() const override { return factors_->flags_in_first(); }
  at::Tensor flag(int64_t index) const override {
    return ops::copy_of(flags().narrow(0, index, 1));
  }

  void abandon() override { factors_ = factors_->renewed(); }

  int64_t bytes() const override {
    return 4 * (factors_->first().numel() + factors_->second().numel());
  }
  int64_t sent_bytes(const comm::Chains& /*chains*/) const override {
    const int64_t ranks = factors_->ranks();
    return 2 * (ranks - 1) * bytes() / ranks;
  }

  at::Tensor residual() const override { return factors_->residual(); }
  void load_residual(const at::Tensor& flat) override {
    const at::NoGradGuard no_grad;
    const at::Tensor residual = factors_->residual();
    if (!flat.is_same(residual)) residual.copy_(flat);
  }
  int64_t residual_bytes() const override {
    const at::Tensor residual = factors_->residual();
    return residual.defined() ? static_cast<int64_t>(residual.nbytes()) : 0;
  }

  at::Tensor factor(int64_t offset) const override { return factors_->kept_right(offset); }
  void load_factor(int64_t offset, const at::Tensor& factor) override {
    factors_->keep_right(offset, factor);
  }

 private:
  std::shared_ptr<const Factors> factors_;
};

}  // namespace

std::unique_ptr<Coding> make_low_rank(const LowRankSpec& spec, int ranks, at::Device device) {
  return std::make_unique<LowRank>(spec, ranks, device);
}

}  // namespace fastsync::engine
