// c10d::Backend has no Python subclasses, and a ProcessGroup written in Python lacks what C++ calls
// by other names than Python does. So this is a backend like any other, and what it is asked for
// goes to an object of Python's.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "python.h"

namespace py = pybind11;

namespace fastsync::comm {
namespace {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

// A collective that Python finishes. It holds no Python object, so that any thread may drop it.
class HostWork final : public c10d::Work {
 public:
  explicit HostWork(Tensors results)
      : results_(std::move(results)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors())) {}

  // Ctrl-C ends the wait of the main thread.
  bool wait(Milliseconds timeout) override {
    constexpr Milliseconds kSlice{100};
    const auto begun = Clock::now();
    std::unique_lock<std::mutex> lock(mutex_);
    const auto done = [this] { return completed_; };
    while (!completed_) {
      const Milliseconds passed = std::chrono::duration_cast<Milliseconds>(Clock::now() - begun);
      TORCH_CHECK(timeout <= kNoTimeout || passed < timeout, "Operation timed out!");
      const Milliseconds left = timeout <= kNoTimeout ? kSlice : timeout - passed;
      if (cv_.wait_for(lock, std::min(kSlice, left), done) || left < kSlice) continue;
      lock.unlock();
      check_signals();
      lock.lock();
    }
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }

  void abort() override { end("the operation was aborted"); }
  Tensors result() override { return results_; }
  int sourceRank() const override { return source_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const std::lock_guard<std::mutex> lock(ending_);
    has_listeners_ = true;
    return future_;
  }

  void set_source(int rank) { source_ = rank; }

  // The first end counts. Callbacks run before those that wait are woken, as they do over Gloo, and
  // on a thread of their own: one may wait for what the calling thread has to end first.
  void end(const std::string& error) {
    {
      const std::lock_guard<std::mutex> lock(ending_);
      if (std::exchange(ended_, true)) return;
      if (!has_listeners_) {
        complete(error);
        return;
      }
    }
    const auto self = c10::intrusive_ptr<HostWork>::reclaim_copy(this);
    std::thread([self, error] { self->complete(error); }).detach();
  }

  static void know_main_thread() { main_thread() = std::this_thread::get_id(); }

 private:
  static std::thread::id& main_thread() {
    static std::thread::id id;
    return id;
  }

  void complete(const std::string& error) {
    if (error.empty()) {
      future_->markCompleted(c10::IValue(results_));
      finish();
      return;
    }
    const auto failure = std::make_exception_ptr(std::runtime_error(error));
    future_->setError(failure);
    finish(failure);
  }

  static void check_signals() {
    if (std::this_thread::get_id() != main_thread()) return;
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }

  Tensors results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::atomic<int> source_{-1};
  std::mutex ending_;  // of what follows
  bool has_listeners_ = false;
  bool ended_ = false;
};

// Several operations as one.
class JoinedWork final : public c10d::Work {
 public:
  explicit JoinedWork(std::vector<c10::intrusive_ptr<c10d::Work>> parts)
      : parts_(std::move(parts)) {}

  bool isCompleted() override {
    return std::all_of(parts_.begin(), parts_.end(),
                       [](const auto& part) { return part->isCompleted(); });
  }
  bool wait(Milliseconds timeout) override {
    for (const auto& part : parts_) part->wait(timeout);
    return true;
  }
  void abort() override {
    for (const auto& part : parts_) part->abort();
  }
  std::vector<at::Tensor> result() override {
    Tensors all;
    for (const auto& part : parts_) {
      for (const at::Tensor& tensor : part->result()) all.push_back(tensor);
    }
    return all;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
        c10::FutureType::create(c10::ListType::ofTensors()));
    for (const auto& part : parts_) futures.push_back(part->getFuture());
    return c10::collectAll(futures);
  }

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> parts_;
};

using Ranked = std::vector<std::pair<int64_t, at::Tensor>>;

std::string described(const Tensors& tensors) {
  std::string text;
  for (const at::Tensor& tensor : tensors) {
    text += c10::str(text.empty() ? "" : ", ", tensor.numel(), " ", tensor.scalar_type());
  }
  return text;
}

// How Python makes one tensor of two: the name of torch's function, and whether the result is
// divided by the ranks.
using Combine = std::pair<std::string, bool>;

// Throws what there is no such thing of.
Combine combine_of(const std::string& backend, const c10d::ReduceOp& op, at::ScalarType dtype) {
  using Op = c10d::ReduceOp;
  static const std::map<Op::RedOpType, std::string> names{
      {Op::SUM, "add"},        {Op::AVG, "add"},         {Op::PRODUCT, "mul"},
      {Op::MIN, "minimum"},    {Op::MAX, "maximum"},     {Op::BAND, "bitwise_and"},
      {Op::BOR, "bitwise_or"}, {Op::BXOR, "bitwise_xor"}};
  const auto name = names.find(op.op_);
  TORCH_CHECK_VALUE(name != names.end(), backend,
                    " has no premultiplied sum: multiply the tensor, and use SUM");
  const bool is_int = at::isIntegralType(dtype, /*includeBool=*/true);
  const bool is_real =
      dtype == at::kDouble || dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
  const bool is_complex = dtype == at::kComplexFloat || dtype == at::kComplexDouble;
  const bool averages = op.op_ == Op::AVG;
  bool known = is_int;
  if (op.op_ == Op::SUM || op.op_ == Op::PRODUCT) known = is_int || is_real || is_complex;
  if (op.op_ == Op::MIN || op.op_ == Op::MAX) known = is_int || is_real;
  if (averages) known = is_real || is_complex;
  TORCH_CHECK_VALUE(known, backend, " has no ", averages ? "average" : name->second, " of ", dtype);
  return {name->second, averages};
}

// A call of a collective: how errors name it, and what all ranks must say alike.
struct Call {
  Call(const std::string& what, const Tensors& tensors) : text(what), same(what) {
    if (!tensors.empty()) same = text += " of " + described(tensors);
  }
  Call& apart(std::string words) {
    same = std::move(words);
    return *this;
  }
  std::string text;
  std::string same;
};

class HostBackend final : public c10d::Backend {
 public:
  HostBackend(int rank, int size, std::string name, Milliseconds timeout, py::object functions)
      : Backend(rank, size),
        name_(std::move(name)),
        options_(c10::make_intrusive<Options>(name_, timeout)),
        // Dropped with the GIL, on any thread.
        functions_(new py::object(std::move(functions)), [](const py::object* object) {
          const py::gil_scoped_acquire gil;
          delete object;
        }) {}

  const std::string getBackendName() const override { return name_; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(Milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return started_; }

  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors,
                                           const c10d::BroadcastOptions& opts) override {
    check(tensors);
    const Call how(c10::str("broadcast from rank ", root(opts)), tensors);
    return collective("broadcast", how, seconds(opts), tensors, only(tensors, "broadcast"),
                      opts.rootRank);
  }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors,
                                           const c10d::AllreduceOptions& opts) override {
    return reduce_to(-1, "all_reduce", only(tensors, "all_reduce"), opts);
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return joined(tensors.size(),
                  [&](size_t i) { return reduce_to(-1, "all_reduce", tensors[i], opts); });
  }
  c10::intrusive_ptr<c10d::Work> reduce(Tensors& tensors,
                                        const c10d::ReduceOptions& opts) override {
    return reduce_to(opts.rootRank, c10::str("reduce to rank ", root(opts)),
                     only(tensors, "reduce"), opts);
  }

  c10::intrusive_ptr<c10d::Work> allgather(TensorLists& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& opts) override {
    return gather_all(only(outputs, "all_gather"), only(inputs, "all_gather"), seconds(opts));
  }
  // Its lists are by rank, those of the others by tensor.
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                     const c10d::AllgatherOptions& opts) override {
    return joined(inputs.size(), [&](size_t i) {
      Tensors everyones;
      for (const Tensors& of_rank : outputs) everyones.push_back(of_rank.at(i));
      return gather_all(everyones, inputs[i], seconds(opts));
    });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& opts) override {
    check_like("all_gather_into_tensor", output, input, size_);
    const Call how("all_gather_into_tensor", {input});
    return collective("all_gather_flat", how, seconds(opts), {output}, output, input);
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    check_pairs("all_gather_into_tensor", outputs, inputs);
    return joined(inputs.size(),
                  [&](size_t i) { return _allgather_base(outputs[i], inputs[i], opts); });
  }

  c10::intrusive_ptr<c10d::Work> reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                const c10d::ReduceScatterOptions& opts) override {
    const Tensors& list = only(inputs, "reduce_scatter");
    at::Tensor output = only(outputs, "reduce_scatter");
    check_list("reduce_scatter", list, output);
    Tensors rows;
    for (const at::Tensor& tensor : list) rows.push_back(tensor.detach().reshape({-1}));
    at::Tensor flat = at::cat(rows);
    return _reduce_scatter_base(output, flat, opts);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    check_like("reduce_scatter_tensor", input, output, size_);
    const Combine by = combine_of(name_, opts.reduceOp, input.scalar_type());
    const Call how(c10::str("reduce_scatter_tensor (", by.second ? "average" : by.first, ")"),
                   {input});
    return collective("reduce_scatter", how, seconds(opts), {output}, output, input, by);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    check_pairs("reduce_scatter_tensor", outputs, inputs);
    return joined(inputs.size(),
                  [&](size_t i) { return _reduce_scatter_base(outputs[i], inputs[i], opts); });
  }

  c10::intrusive_ptr<c10d::Work> gather(TensorLists& outputs, Tensors& inputs,
                                        const c10d::GatherOptions& opts) override {
    Tensors received;
    if (root(opts) == rank_) {
      received = only(outputs, "gather");
      check_list("gather", received, only(inputs, "gather"));
    }
    const Call how(c10::str("gather to rank ", opts.rootRank), inputs);
    const Ranked sent{{opts.rootRank, only(inputs, "gather")}};
    return exchange(how, seconds(opts), by_rank(received), sent);
  }
  c10::intrusive_ptr<c10d::Work> scatter(Tensors& outputs, TensorLists& inputs,
                                         const c10d::ScatterOptions& opts) override {
    Tensors sent;
    if (root(opts) == rank_) {
      sent = only(inputs, "scatter");
      check_list("scatter", sent, only(outputs, "scatter"));
    }
    const Call how(c10::str("scatter from rank ", opts.rootRank), outputs);
    const Ranked received{{opts.rootRank, only(outputs, "scatter")}};
    return exchange(how, seconds(opts), received, by_rank(sent));
  }
  c10::intrusive_ptr<c10d::Work> alltoall(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllToAllOptions& opts) override {
    for (const Tensors& tensors : {outputs, inputs}) {
      TORCH_CHECK_VALUE(tensors.size() == static_cast<size_t>(size_), "all_to_all takes ", size_,
                        " tensors, not ", tensors.size());
    }
    const Call how = Call("all_to_all", inputs).apart("all_to_all");
    return exchange(how, seconds(opts), by_rank(outputs), by_rank(inputs));
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits,
                                               std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& opts) override {
    const auto parts = [this](const at::Tensor& tensor, std::vector<int64_t> splits) {
      const int64_t length = tensor.dim() == 0 ? 1 : tensor.size(0);
      if (splits.empty()) {
        TORCH_CHECK_VALUE(length % size_ == 0, "all_to_all_single: the first dimension, ", length,
                          ", does not divide by ", size_, " ranks");
        splits.assign(static_cast<size_t>(size_), length / size_);
      }
      TORCH_CHECK_VALUE(splits.size() == static_cast<size_t>(size_) &&
                            std::accumulate(splits.begin(), splits.end(), int64_t{0}) == length,
                        "all_to_all_single: splits ", splits, " do not cut ", length, " rows into ",
                        size_, " parts");
      return tensor.detach().split_with_sizes(splits);
    };
    const Call how = Call("all_to_all_single", {input}).apart("all_to_all_single");
    return exchange(how, seconds(opts), by_rank(parts(output, output_splits)),
                    by_rank(parts(input, input_splits)));
  }

  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int rank, int tag) override {
    check(tensors);
    const Call how(c10::str("send to rank ", rank), tensors);
    return call("message", how, seconds(options_->timeout), {}, "send", rank, tag,
                only(tensors, "send"));
  }
  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int rank, int tag) override {
    check(tensors);
    const Call how(rank < 0 ? "recv from any rank" : c10::str("recv from rank ", rank), tensors);
    return call("message", how, seconds(options_->timeout), tensors, "recv", rank, tag,
                only(tensors, "recv"));
  }
  c10::intrusive_ptr<c10d::Work> recvAnysource(Tensors& tensors, int tag) override {
    return recv(tensors, -1, tag);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override {
    return collective("barrier", {"barrier", {}}, seconds(opts), {});
  }

  void shutdown() override { close(); }
  void abort() override { close(); }

  // Refuses every later request.
  void close() {
    const py::gil_scoped_acquire gil;
    const std::shared_ptr<const py::object> functions = std::move(functions_);
    if (functions) functions->attr("close")();
  }

 private:
  template <typename Given>
  double seconds(const Given& opts) const {
    return seconds(opts.timeout == c10d::kUnsetTimeout ? options_->timeout : opts.timeout);
  }
  double seconds(Milliseconds time) const { return 1e-3 * static_cast<double>(time.count()); }

  void check(const Tensors& tensors) const {
    for (const at::Tensor& tensor : tensors) {
      TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.layout() == at::kStrided, name_,
                        " carries dense CPU tensors, but this one is ",
                        tensor.layout() == at::kStrided ? tensor.device().str() : "sparse");
    }
  }
  void check_like(const char* what, const at::Tensor& one, const at::Tensor& other,
                  int64_t times) const {
    check({one, other});
    TORCH_CHECK_VALUE(
        one.numel() == times * other.numel() && one.scalar_type() == other.scalar_type(), what,
        ": ", described({one}), " is not ", times, " times ", described({other}));
  }
  // A tensor of every rank, each like `one`.
  void check_list(const char* what, const Tensors& list, const at::Tensor& one) const {
    TORCH_CHECK_VALUE(list.size() == static_cast<size_t>(size_), what, " takes a list of ", size_,
                      " tensors, not ", list.size());
    for (const at::Tensor& tensor : list) check_like(what, tensor, one, 1);
  }
  static void check_pairs(const char* what, const Tensors& outputs, const Tensors& inputs) {
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(), what, " takes as many outputs as inputs");
  }
  template <typename Item>
  static const Item& only(const std::vector<Item>& items, const char* what) {
    TORCH_CHECK_VALUE(items.size() == 1, what, " takes one, not ", items.size());
    return items.front();
  }
  template <typename Given>
  int64_t root(const Given& opts) const {
    TORCH_CHECK_VALUE(opts.rootRank >= 0 && opts.rootRank < size_,
                      "invalid root rank: ", opts.rootRank);
    return opts.rootRank;
  }
  static Ranked by_rank(const Tensors& tensors) {
    Ranked result;
    for (const at::Tensor& tensor : tensors) result.emplace_back(result.size(), tensor);
    return result;
  }

  template <typename Given>
  c10::intrusive_ptr<c10d::Work> reduce_to(int64_t to, const std::string& what,
                                           const at::Tensor& tensor, const Given& opts) {
    check({tensor});
    const Combine by = combine_of(name_, opts.reduceOp, tensor.scalar_type());
    const Call how(c10::str(what, " (", by.second ? "average" : by.first, ")"), {tensor});
    return collective("reduce", how, seconds(opts), {tensor}, tensor, by, to);
  }
  c10::intrusive_ptr<c10d::Work> gather_all(const Tensors& outputs, const at::Tensor& input,
                                            double seconds) {
    check_list("all_gather", outputs, input);
    return collective("all_gather", {"all_gather", {input}}, seconds, outputs, outputs, input);
  }
  template <typename Start>
  static c10::intrusive_ptr<c10d::Work> joined(size_t count, const Start& start) {
    std::vector<c10::intrusive_ptr<c10d::Work>> parts;
    for (size_t i = 0; i < count; ++i) parts.push_back(start(i));
    return c10::make_intrusive<JoinedWork>(std::move(parts));
  }
  c10::intrusive_ptr<c10d::Work> exchange(const Call& how, double seconds, const Ranked& received,
                                          const Ranked& sent) {
    Tensors results;
    for (const auto& [rank, tensor] : received) results.push_back(tensor);
    check(results);
    for (const auto& [rank, tensor] : sent) check({tensor});
    return collective("exchange", how, seconds, results, received, sent);
  }

  template <typename... Args>
  c10::intrusive_ptr<c10d::Work> collective(const char* name, const Call& how, double seconds,
                                            const Tensors& results, Args&&... args) {
    return call("collective", how, seconds, results, name, std::forward<Args>(args)...);
  }
  template <typename... Args>
  c10::intrusive_ptr<c10d::Work> call(const char* function, const Call& how, double seconds,
                                      const Tensors& results, Args&&... args) {
    const py::gil_scoped_acquire gil;
    TORCH_CHECK(functions_, "this process group of ", name_, " has been destroyed");
    ++started_;
    const auto work = c10::make_intrusive<HostWork>(results);
    functions_->attr(function)(py::make_tuple(work, how.text, how.same, seconds),
                               std::forward<Args>(args)...);
    return work;
  }

  const std::string name_;
  const c10::intrusive_ptr<Options> options_;
  std::shared_ptr<const py::object> functions_;
  uint64_t started_ = 0;
};

}  // namespace

void bind_host_backend(py::module_& m) {
  HostWork::know_main_thread();
  const auto release = py::call_guard<py::gil_scoped_release>();
  py::class_<HostWork, c10d::Work, c10::intrusive_ptr<HostWork>>(m, "HostWork")
      .def("set_source", &HostWork::set_source, py::arg("rank"))
      .def("end", &HostWork::end, release, py::arg("error") = "");
  py::class_<HostBackend, c10d::Backend, c10::intrusive_ptr<HostBackend>>(m, "HostBackend")
      .def(py::init([](int rank, int size, const std::string& name, double seconds,
                       py::object functions) {
             const Milliseconds timeout(static_cast<int64_t>(1e3 * seconds));
             return c10::make_intrusive<HostBackend>(rank, size, name, timeout,
                                                     std::move(functions));
           }),
           py::arg("rank"), py::arg("size"), py::arg("name"), py::arg("seconds"),
           py::arg("functions"))
      .def("close", &HostBackend::close, release);
}

}  // namespace fastsync::comm
