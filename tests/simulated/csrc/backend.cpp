// A backend that enqueues collectives as NCCL does, and carries the bytes over Gloo.
//
// Each communicator has a stream. A collective is two tasks in it: one starts Gloo on copies of the
// inputs, and one, which is ready when Gloo has ended, writes the outputs. If a peer is gone the
// second is never ready, as a kernel of NCCL spins, until the communicator is aborted or the
// watchdog ends the process.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <pybind11/functional.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "device.h"

namespace simulated {

void seed_operators(uint64_t seed);

namespace {

using Tensors = std::vector<at::Tensor>;
using Seconds = std::chrono::duration<double>;
// Starts Gloo on the inputs' copies, and says where it puts what goes to the outputs.
using Start = std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&, Tensors&, Tensors&)>;

struct Shared {
  c10::intrusive_ptr<c10d::Backend> gloo;
  Seconds timeout;
  bool ends_process;
  std::atomic<bool> aborted{false};
};

class EnqueuedWork final : public c10d::Work {
 public:
  EnqueuedWork(int rank, c10d::OpType type, std::shared_ptr<Shared> shared, Tensors outputs,
               c10::Stream stream, Moment end, bool host_waits)
      : Work(rank, type),
        shared_(std::move(shared)),
        outputs_(std::move(outputs)),
        end_(std::move(end)),
        host_waits_(host_waits) {
    const c10::StreamGuard guard(stream);
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream.device()});
    future_->markCompleted(c10::IValue(outputs_));
  }

  bool isCompleted() override { return shared_->aborted || has_passed(end_); }
  bool isSuccess() const override { return !exception() && has_passed(end_); }
  std::exception_ptr exception() const override {
    if (!shared_->aborted) return nullptr;
    return std::make_exception_ptr(std::runtime_error("the communicator was aborted"));
  }
  bool wait(std::chrono::milliseconds) override {
    simulated::wait(current_stream(), end_);
    if (host_waits_) host_wait(end_, "barrier");
    kept_->clear();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  std::vector<at::Tensor> result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return 0; }

  void keep(std::shared_ptr<Tensors> tensors) { kept_ = std::move(tensors); }
  const std::shared_ptr<Tensors>& kept() const { return kept_; }
  const Moment& end() const { return end_; }

 private:
  const std::shared_ptr<Shared> shared_;
  const Tensors outputs_;
  const Moment end_;
  const bool host_waits_;
  std::shared_ptr<Tensors> kept_ = std::make_shared<Tensors>();  // until a wait
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

at::Tensor host_memory(const at::Tensor& like) {
  return at::empty(like.sizes(), like.options().device(at::kCPU));
}

void copy_bytes(const at::Tensor& to, const at::Tensor& from) {
  std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
}

at::Tensor seen_by_host(const at::Tensor& tensor) {
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.numel(),
                       tensor.options().device(at::kCPU));
}

class Communicator final : public c10d::Backend {
 public:
  Communicator(c10::intrusive_ptr<c10d::Backend> gloo, double timeout, bool ends_process)
      : Backend(gloo->getRank(), gloo->getSize()), shared_(std::make_shared<Shared>()) {
    shared_->gloo = std::move(gloo);
    shared_->timeout = Seconds(timeout);
    shared_->ends_process = ends_process;
  }

  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds timeout) override { shared_->timeout = timeout; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(shared_->timeout);
    return c10::make_intrusive<Options>("simccl", timeout);
  }
  void abort() override {
    shared_->aborted = true;
    poke();
  }
  void eagerConnectSingleDevice(at::Device device) override { connect(device); }

  void startCoalescing() override {
    coalescing_ = true;
    coalesced_.clear();
  }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    coalescing_ = false;
    TORCH_CHECK(last_end_, "nothing was coalesced");
    auto work = c10::make_intrusive<EnqueuedWork>(rank_, c10d::OpType::COALESCED, shared_,
                                                  coalesced_, *stream_, last_end_, false);
    work->keep(std::make_shared<Tensors>(std::move(coalesced_)));
    coalesced_.clear();
    return work;
  }

  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors,
                                           const c10d::BroadcastOptions& opts) override {
    return in_place("broadcast", c10d::OpType::BROADCAST, tensors,
                    [opts](auto& gloo, Tensors& on) { return gloo.broadcast(on, opts); });
  }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors,
                                           const c10d::AllreduceOptions& opts) override {
    const auto reduction = reduced_by(opts.reduceOp);
    c10d::AllreduceOptions inner = opts;
    inner.reduceOp = reduction.op;
    return in_place(
        "all_reduce", c10d::OpType::ALLREDUCE, tensors,
        [inner](auto& gloo, Tensors& on) { return gloo.allreduce(on, inner); }, reduction.factor);
  }

  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    startCoalescing();
    for (const at::Tensor& tensor : tensors) {
      Tensors one{tensor};
      c10d::AllreduceOptions each;
      each.reduceOp = opts.reduceOp;
      allreduce(one, each);
    }
    return endCoalescing();
  }

  c10::intrusive_ptr<c10d::Work> reduce(Tensors& tensors,
                                        const c10d::ReduceOptions& opts) override {
    c10d::AllreduceOptions all;  // on the other ranks what comes out is undefined anyway
    all.reduceOp = opts.reduceOp;
    return allreduce(tensors, all);
  }

  c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions&) override {
    return collective("all_gather", c10d::OpType::ALLGATHER, inputs, outputs.front(),
                      [](auto& gloo, Tensors& in, Tensors& out) {
                        std::vector<Tensors> all{out};
                        return gloo.allgather(all, in);
                      });
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions&) override {
    TORCH_CHECK_VALUE(output.numel() == input.numel() * size_, "all_gather: sizes do not fit");
    return collective("all_gather", c10d::OpType::_ALLGATHER_BASE, {input}, {output},
                      [size = size_](auto& gloo, Tensors& in, Tensors& out) {
                        std::vector<Tensors> all{parts(out.front(), size)};
                        Tensors flat{in.front().view({-1})};
                        return gloo.allgather(all, flat);
                      });
  }

  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    startCoalescing();
    for (size_t i = 0; i < outputs.size(); ++i) _allgather_base(outputs[i], inputs[i], opts);
    return endCoalescing();
  }

  c10::intrusive_ptr<c10d::Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                const c10d::ReduceScatterOptions& opts) override {
    return scattered(outputs.front(), inputs.front(), opts);
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    TORCH_CHECK_VALUE(input.numel() == output.numel() * size_, "reduce_scatter: sizes do not fit");
    return scattered(output, {input}, opts);
  }

  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    startCoalescing();
    for (size_t i = 0; i < outputs.size(); ++i) _reduce_scatter_base(outputs[i], inputs[i], opts);
    return endCoalescing();
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits,
                                               std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions&) override {
    return collective("all_to_all", c10d::OpType::ALLTOALL_BASE, {input}, {output},
                      [received = output_splits, sent = input_splits](auto& gloo, Tensors& in,
                                                                      Tensors& out) mutable {
                        return gloo.alltoall_base(out.front(), in.front(), received, sent);
                      });
  }

  c10::intrusive_ptr<c10d::Work> alltoall(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllToAllOptions&) override {
    return collective("all_to_all", c10d::OpType::ALLTOALL, inputs, outputs,
                      [](auto& gloo, Tensors& in, Tensors& out) {
                        std::vector<int64_t> sent, received;
                        for (const at::Tensor& tensor : in) sent.push_back(tensor.numel());
                        for (const at::Tensor& tensor : out) received.push_back(tensor.numel());
                        at::Tensor from = joined(in);
                        at::Tensor to = at::empty({sum(received)}, from.options());
                        auto work = gloo.alltoall_base(to, from, received, sent);
                        int64_t begin = 0;
                        for (at::Tensor& tensor : out) {
                          tensor = to.narrow(0, begin, tensor.numel());
                          begin += tensor.numel();
                        }
                        return work;
                      });
  }

  c10::intrusive_ptr<c10d::Work> gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                        const c10d::GatherOptions& opts) override {
    const bool root = rank_ == opts.rootRank;
    return collective("gather", c10d::OpType::GATHER, inputs, root ? outputs.front() : Tensors{},
                      [opts, root](auto& gloo, Tensors& in, Tensors& out) {
                        std::vector<Tensors> all;
                        if (root) all.push_back(out);
                        return gloo.gather(all, in, opts);
                      });
  }

  c10::intrusive_ptr<c10d::Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ScatterOptions& opts) override {
    const bool root = rank_ == opts.rootRank;
    return collective("scatter", c10d::OpType::SCATTER, root ? inputs.front() : Tensors{}, outputs,
                      [opts, root](auto& gloo, Tensors& in, Tensors& out) {
                        std::vector<Tensors> all;
                        if (root) all.push_back(in);
                        return gloo.scatter(out, all, opts);
                      });
  }

  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int to, int tag) override {
    return collective(
        "send", c10d::OpType::SEND, tensors, {},
        [to, tag](auto& gloo, Tensors& in, Tensors&) { return gloo.send(in, to, tag); });
  }

  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int from, int tag) override {
    return collective(
        "recv", c10d::OpType::RECV, {}, tensors,
        [from, tag](auto& gloo, Tensors&, Tensors& out) { return gloo.recv(out, from, tag); });
  }

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override {
    const at::Device device = stream_ ? stream_->device() : current_stream().device();
    const at::Tensor one = at::zeros({1}, at::TensorOptions(device));
    host_waits_ = true;
    Tensors tensors{one};
    auto work = allreduce(tensors, {});
    host_waits_ = false;
    return work;
  }

 private:
  struct Reduction {
    c10d::ReduceOp op;
    double factor;
  };

  Reduction reduced_by(const c10d::ReduceOp& op) const {
    if (op == c10d::ReduceOp::AVG) return {c10d::ReduceOp::SUM, 1.0 / size_};
    TORCH_CHECK(op != c10d::ReduceOp::PREMUL_SUM, "simccl has no PREMUL_SUM");
    const bool bitwise =
        op == c10d::ReduceOp::BAND || op == c10d::ReduceOp::BOR || op == c10d::ReduceOp::BXOR;
    TORCH_CHECK_VALUE(!bitwise, "NCCL has no bitwise reductions");
    return {op, 1.0};
  }

  static int64_t sum(const std::vector<int64_t>& all) {
    int64_t total = 0;
    for (const int64_t one : all) total += one;
    return total;
  }

  static at::Tensor joined(const Tensors& all) {
    int64_t numel = 0;
    for (const at::Tensor& tensor : all) numel += tensor.numel();
    at::Tensor flat = at::empty({numel}, all.front().options());
    auto* to = static_cast<char*>(flat.mutable_data_ptr());
    for (const at::Tensor& tensor : all) {
      std::memcpy(to, tensor.const_data_ptr(), tensor.nbytes());
      to += tensor.nbytes();
    }
    return flat;
  }

  static Tensors parts(const at::Tensor& flat, int size) {
    Tensors all;
    const int64_t each = flat.numel() / size;
    for (int r = 0; r < size; ++r) all.push_back(flat.view({-1}).narrow(0, r * each, each));
    return all;
  }

  static void multiply(const Tensors& tensors, double factor) {
    if (factor == 1.0) return;
    for (const at::Tensor& tensor : tensors) const_cast<at::Tensor&>(tensor).mul_(factor);
  }

  // An all-reduce, of which a part is kept: as Gloo does it itself, so that sums have the same
  // bits.
  c10::intrusive_ptr<c10d::Work> scattered(const at::Tensor& output, const Tensors& inputs,
                                           const c10d::ReduceScatterOptions& opts) {
    const Reduction reduction = reduced_by(opts.reduceOp);
    c10d::AllreduceOptions all;
    all.reduceOp = reduction.op;
    factor_ = reduction.factor;
    return collective("reduce_scatter", c10d::OpType::_REDUCE_SCATTER_BASE, inputs, {output},
                      [all, rank = rank_, size = size_](auto& gloo, Tensors& in, Tensors& out) {
                        Tensors flat{joined(in)};
                        auto work = gloo.allreduce(flat, all);
                        out.front() = parts(flat.front(), size)[static_cast<size_t>(rank)];
                        return work;
                      });
  }

  template <class Run>
  c10::intrusive_ptr<c10d::Work> in_place(const char* name, c10d::OpType type, Tensors& tensors,
                                          Run run, double factor = 1.0) {
    factor_ = factor;
    return collective(name, type, tensors, tensors, [run](auto& gloo, Tensors& in, Tensors& out) {
      out = in;
      return run(gloo, in);
    });
  }

  // Ranks meet when a communicator is made, which torch does at its first collective: all must
  // come.
  void connect(at::Device device) {
    if (stream_) return;
    shared_->gloo->barrier()->wait();
    stream_ = new_stream(device.index());
  }

  static void check(const char* name, const Tensors& tensors) {
    for (const at::Tensor& tensor : tensors) {
      TORCH_CHECK_VALUE(tensor.device().type() == kDevice, name, ": tensors must be on the device");
      TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, name, ": tensors must be dense");
      TORCH_CHECK_VALUE(tensor.is_contiguous(), name, ": tensors must be contiguous");
    }
  }

  struct Carried {
    c10::intrusive_ptr<c10d::Work> work;
    Tensors in, out;
    std::chrono::steady_clock::time_point started;
  };

  c10::intrusive_ptr<c10d::Work> collective(const char* name, c10d::OpType type,
                                            const Tensors& inputs, const Tensors& outputs,
                                            Start start) {
    check(name, inputs);
    check(name, outputs);
    TORCH_CHECK(!shared_->aborted, name, ": the communicator was aborted");
    const c10::Device device = (inputs.empty() ? outputs : inputs).front().device();
    connect(device);
    release();
    wait(*stream_, record(current_stream(device.index())));
    const auto carried = std::make_shared<Carried>();
    enqueue(*stream_, begin(name, inputs, outputs, carried, std::move(start)));
    enqueue(*stream_, end(name, outputs, carried));
    auto work = c10::make_intrusive<EnqueuedWork>(rank_, type, shared_, outputs, *stream_,
                                                  record(*stream_), host_waits_);
    auto kept = std::make_shared<Tensors>(inputs);
    kept->insert(kept->end(), outputs.begin(), outputs.end());
    work->keep(kept);
    if (coalescing_) coalesced_.insert(coalesced_.end(), kept->begin(), kept->end());
    unwaited_.emplace_back(work->end(), kept);
    last_end_ = work->end();
    return work;
  }

  Task begin(const char* name, const Tensors& inputs, const Tensors& outputs,
             const std::shared_ptr<Carried>& carried, Start start) const {
    Task task{name, nullptr};
    Tensors from;
    for (const at::Tensor& tensor : inputs) {
      task.ranges.push_back({tensor.const_data_ptr(), tensor.nbytes(), false, true});
      from.push_back(seen_by_host(tensor).view(tensor.sizes()));
    }
    for (const at::Tensor& tensor : outputs) carried->out.push_back(host_memory(tensor));
    task.run = [shared = shared_, from, carried, start = std::move(start)] {
      carried->started = std::chrono::steady_clock::now();
      for (const at::Tensor& tensor : from) {
        carried->in.push_back(host_memory(tensor));
        copy_bytes(carried->in.back(), tensor);
      }
      try {
        carried->work = start(*shared->gloo, carried->in, carried->out);
      } catch (const std::exception& error) {
        // A peer is gone: nothing ends.
        fprintf(stderr, "simccl: a collective cannot be started: %s\n", error.what());
      }
    };
    return task;
  }

  Task end(const char* name, const Tensors& outputs, const std::shared_ptr<Carried>& carried) {
    Task task{name, nullptr};
    Tensors to;
    for (const at::Tensor& tensor : outputs) {
      task.ranges.push_back({tensor.const_data_ptr(), tensor.nbytes(), true, true});
      to.push_back(seen_by_host(tensor));
    }
    task.ready = [shared = shared_, carried, name] {
      if (shared->aborted) return true;
      if (carried->work && carried->work->isCompleted() && !carried->work->exception()) return true;
      if (std::chrono::steady_clock::now() - carried->started > shared->timeout &&
          shared->ends_process) {
        fprintf(stderr, "simccl's watchdog: %s timed out after %.0f s\n", name,
                shared->timeout.count());
        std::abort();
      }
      return false;
    };
    task.run = [shared = shared_, carried, to, factor = factor_] {
      if (!shared->aborted) {
        multiply(carried->out, factor);
        for (size_t i = 0; i < to.size(); ++i) copy_bytes(to[i], carried->out[i]);
      }
      *carried = {};
    };
    factor_ = 1.0;
    return task;
  }

  // Releases tensors of collectives without a wait once they have ended, from a later one.
  void release() {
    while (!unwaited_.empty() && unwaited_.front().first->passed) {
      for (const at::Tensor& tensor : *unwaited_.front().second) {
        use_on(tensor.storage().data_ptr(), *stream_);
      }
      unwaited_.front().second->clear();
      unwaited_.pop_front();
    }
  }

  const std::shared_ptr<Shared> shared_;
  std::optional<c10::Stream> stream_;
  std::deque<std::pair<Moment, std::shared_ptr<Tensors>>> unwaited_;
  Moment last_end_;
  Tensors coalesced_;
  bool coalescing_ = false;
  bool host_waits_ = false;
  double factor_ = 1.0;
};

std::string node_name() {
  const auto node = torch::autograd::get_current_node();
  return node ? node->name() : "";
}

void ask_where(const py::object& callback) {
  if (callback.is_none()) {
    switches().where = nullptr;
    return;
  }
  // The interpreter may be gone when it would be let go.
  auto* kept = new py::object(callback);
  switches().where = [kept] {
    const std::string node = node_name();
    const py::gil_scoped_acquire gil;
    return (*kept)(node).cast<std::string>();
  };
}

}  // namespace
}  // namespace simulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simulated;
  using release = py::call_guard<py::gil_scoped_release>;
  m.def("make_backend",
        [](c10::intrusive_ptr<c10d::Backend> gloo, double timeout,
           bool ends_process) -> c10::intrusive_ptr<c10d::Backend> {
          return c10::make_intrusive<Communicator>(std::move(gloo), timeout, ends_process);
        });
  py::class_<Report>(m, "Report")
      .def_readonly("waits", &Report::waits)
      .def_readonly("races", &Report::races)
      .def_readonly("launches", &Report::launches)
      .def_readonly("kernels", &Report::kernels)
      .def_readonly("allocated", &Report::allocated)
      .def_readonly("peak", &Report::peak)
      .def_readonly("edges", &Report::edges)
      .def_readonly("records", &Report::records)
      .def_readonly("dropped", &Report::dropped)
      .def_readonly("live", &Report::live);
  m.def("report", &report, py::arg("reset") = false);
  m.def("synchronize", &synchronize_all, release());
  m.def("start_detecting", &start_detecting, release());
  m.def("stop_detecting", &stop_detecting, release());
  m.def("name_memory", [](uintptr_t begin, size_t bytes, std::string name) {
    name_memory(reinterpret_cast<const void*>(begin), bytes, std::move(name));
  });
  m.def("drop", &drop, py::arg("edge") = 0, py::arg("record") = 0);
  m.def("ask_where", &ask_where);
  m.def("refuse_waits", [](bool refuse) { switches().refuses_waits = refuse; });
  m.def("set_lag", [](double lag) { switches().lag = lag; });
  m.def("seed", &seed);
  m.def("seed_operators", &seed_operators);
  m.def("sleep", [](double seconds) {
    const auto begun = std::make_shared<std::optional<std::chrono::steady_clock::time_point>>();
    enqueue(current_stream(), {"sleep",
                               [] {},
                               {},
                               [=] {
                                 const auto now = std::chrono::steady_clock::now();
                                 if (!*begun) *begun = now;
                                 return now - **begun >= Seconds(seconds);
                               }});
  });
}
