// Python bindings, and nothing else. c10d headers stay out: a process group arrives as the name it
// is registered under.
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/bindings.h"
#include "check.h"
#include "comm/python.h"
#include "ops/device.h"
#include "ops/ops.h"
#include "reducer/reducer.h"
#include "shm/collective.h"

namespace py = pybind11;
using namespace fastsync;  // NOLINT: bindings only

namespace {

using Tensors = std::vector<at::Tensor>;

std::shared_ptr<engine::Reducer> make_reducer(
    const Tensors& params, const std::vector<std::string>& names, const std::string& group_name,
    bool static_graph, bool fail_on_unused, bool skip_unused, bool check_finite, bool may_skip,
    std::shared_ptr<engine::Precision> precision, const Tensors& leaves) {
  engine::ReducerOptions options;
  options.static_graph = static_graph;
  options.fail_on_unused = fail_on_unused;
  options.skip_unused = skip_unused;
  options.check_finite = check_finite;
  options.may_skip = may_skip;
  // The last reference to a process group may be the reducer's. The group's end joins threads, and
  // these may want the GIL to free what Python lent them.
  return {new engine::Reducer(params, names, group_name, options, std::move(precision), leaves),
          torch::impl::destroy_without_gil<engine::Reducer>};
}

void survive(engine::Reducer& reducer,
             std::function<int64_t(int64_t, bool, const std::string&)> meet,
             std::function<void()> rebuild, double timeout) {
  const auto whole = std::chrono::milliseconds(static_cast<int64_t>(timeout * 1e3));
  reducer.survive({std::move(meet), std::move(rebuild), whole});
}

void set_hook(engine::Reducer& reducer, py::object state, const py::object& hook,
              const std::string& flags_group) {
  comm::Hook wrapped = comm::make_python_hook(std::move(state), hook);
  const py::gil_scoped_release release;
  reducer.set_hook(std::move(wrapped), flags_group);
}

Optionals residuals_of(const engine::Reducer& reducer) {
  const py::gil_scoped_release release;
  return optionals_of(reducer.residuals());
}

void load_residuals(engine::Reducer& reducer, const Optionals& given) {
  const py::gil_scoped_release release;
  reducer.load_residuals(tensors_of(given));
}

py::dict stats_dict(const engine::Reducer& reducer) {
  // A hook that holds the reducer's lock may wait for the GIL to free a gradient.
  const engine::ReducerStats stats = [&] {
    const py::gil_scoped_release release;
    return reducer.stats();
  }();
  py::dict result;
  result["steps"] = stats.steps;
  result["plans"] = stats.plans;
  result["collectives"] = stats.collectives;
  result["bytes"] = stats.bytes;
  result["sent_bytes"] = stats.sent_bytes;
  result["between_nodes_bytes"] = stats.between_nodes_bytes;
  result["residual_bytes"] = stats.residual_bytes;
  result["exposed_seconds"] = stats.exposed_seconds;
  return result;
}

py::dict last_step_dict(const engine::Reducer& reducer) {
  engine::StepReport report;
  {
    const py::gil_scoped_release release;
    report = reducer.last_step();
  }
  py::dict result;
  result["forward_start"] = report.times.forward_start;
  result["forward_end"] = report.times.forward_end;
  result["backward_start"] = report.times.backward_start;
  result["first_send"] = report.times.first_send;
  result["backward_end"] = report.times.backward_end;
  result["received"] = report.times.received;
  result["buckets"] = report.buckets;
  result["used"] = report.used;
  result["same_so_far"] = report.same_so_far;
  result["error"] = report.error;
  return result;
}

py::list events_list(const engine::Timeline& timeline) {
  py::list result;
  for (const engine::TimelineEvent& event : timeline.events()) {
    result.append(py::make_tuple(event.step, engine::to_string(event.mark), event.index,
                                 event.bytes, event.time));
  }
  return result;
}

void bind_timeline(py::module_& m) {
  using engine::Timeline;
  py::class_<Timeline, std::shared_ptr<Timeline>>(m, "Timeline")
      .def(py::init([](int64_t capacity, const std::string& device) {
             FS_CHECK_VALUE(capacity > 0, "a timeline must hold at least one mark");
             return std::make_shared<Timeline>(static_cast<size_t>(capacity), at::Device(device));
           }),
           py::arg("capacity"), py::arg("device"))
      .def("events", &events_list)
      .def(
          "await_events",
          [](const Timeline& timeline, double seconds) {
            return timeline.await_events(std::chrono::milliseconds(std::llround(seconds * 1e3)));
          },
          py::call_guard<py::gil_scoped_release>(), py::arg("seconds"))
      .def("dropped", &Timeline::dropped);
}

using Address = std::tuple<int64_t, int64_t, uint64_t, uint64_t>;

void bind_memory(py::module_& m) {
  using comm::SharedMemory;
  using comm::ShmCollective;
  const auto release = py::call_guard<py::gil_scoped_release>();
  py::class_<SharedMemory, std::shared_ptr<SharedMemory>>(m, "SharedMemory")
      .def(py::init<int64_t>(), release, py::arg("bytes"))
      .def("address",
           [](const SharedMemory& memory) {
             const comm::SegmentAddress& at = memory.address();
             return Address{at.pid, at.fd, at.bytes, at.key};
           })
      .def(
          "connect",
          [](SharedMemory& memory, const std::vector<Address>& addresses, int64_t rank,
             double timeout) {
            std::vector<comm::SegmentAddress> all;
            for (const auto& [pid, fd, bytes, key] : addresses)
              all.push_back({pid, fd, bytes, key});
            memory.connect(all, rank, timeout);
          },
          release, py::arg("addresses"), py::arg("rank"), py::arg("timeout"))
      .def("make_flat", &SharedMemory::make_flat, release, py::arg("numel"), py::arg("dtype"));
  using comm::SharedStatements;
  py::class_<SharedStatements, std::shared_ptr<SharedStatements>>(m, "SharedStatements")
      .def(py::init([](const SharedMemory& memory, size_t channel, double timeout) {
             const auto limit = std::chrono::duration<double>(timeout);
             return std::make_shared<SharedStatements>(
                 memory, channel, std::chrono::duration_cast<std::chrono::milliseconds>(limit));
           }),
           py::arg("memory"), py::arg("channel"), py::arg("timeout"))
      .def("exchange", &SharedStatements::exchange, release, py::arg("said"), py::arg("number"));
  py::class_<ShmCollective, std::shared_ptr<ShmCollective>>(m, "SharedCollective")
      .def(py::init<std::shared_ptr<SharedMemory>, size_t>(), release, py::arg("memory"),
           py::arg("channel"))
      .def(
          "all_reduce",
          [](ShmCollective& ranks, const at::Tensor& flat) { ranks.all_reduce(flat)->wait(); },
          release, py::arg("flat"))
      .def(
          "all_to_all",
          [](ShmCollective& ranks, const at::Tensor& received, const at::Tensor& sent) {
            ranks.all_to_all(received, sent)->wait();
          },
          release, py::arg("received"), py::arg("sent"))
      .def(
          "all_gather",
          [](ShmCollective& ranks, const at::Tensor& gathered, const at::Tensor& mine) {
            ranks.all_gather(gathered, mine)->wait();
          },
          release, py::arg("gathered"), py::arg("mine"))
      .def(
          "reduce_scatter",
          [](ShmCollective& ranks, const at::Tensor& mine, const at::Tensor& all) {
            ranks.reduce_scatter(mine, all)->wait();
          },
          release, py::arg("mine"), py::arg("all"));
}

// The first and the last stage of a hierarchical pipeline join the ranks of a node, which may share
// memory.
void use_pipelines(engine::Reducer& reducer, const std::vector<std::string>& group_names,
                   const std::shared_ptr<comm::SharedMemory>& node_memory, size_t group) {
  std::vector<std::shared_ptr<comm::Collective>> stages;
  for (const std::string& name : group_names) stages.push_back(comm::Collective::resolve(name));
  if (node_memory) {
    stages.front() = std::make_shared<comm::ShmCollective>(node_memory, 0);
    stages.back() = std::make_shared<comm::ShmCollective>(node_memory, 1);
  }
  reducer.use_pipelines(std::move(stages), group);
}

void use_memory(engine::Reducer& reducer, const std::shared_ptr<comm::SharedMemory>& memory,
                size_t group) {
  if (!memory) {
    return reducer.use_memory(nullptr, nullptr, std::make_shared<ops::BufferPool>(), group);
  }
  const auto regions = std::make_shared<comm::ShmCollective>(memory, 1);
  auto sums = std::make_shared<comm::ShmCollective>(memory, 0);
  reducer.use_memory(std::move(sums), regions, regions->pool(), group);
}

// Called in backwards, without the GIL.
void use_weights(engine::Reducer& reducer, std::function<std::vector<size_t>(bool)> begin_backward,
                 std::function<std::vector<size_t>(int64_t)> start,
                 std::function<std::variant<double, at::Tensor>()> scale) {
  const py::gil_scoped_release release;
  reducer.use_weights({std::move(begin_backward), std::move(start), std::move(scale)});
}

void bind_engine(py::module_& m) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  py::class_<engine::ForwardAdvice>(m, "ForwardAdvice")
      .def_readonly("regrouped", &engine::ForwardAdvice::regrouped)
      .def_readonly("unused", &engine::ForwardAdvice::unused)
      .def_readonly("new_timing", &engine::ForwardAdvice::new_timing);
  using engine::Precision;
  py::class_<Precision, std::shared_ptr<Precision>>(m, "Precision")
      .def(py::init<Tensors, at::ScalarType>(), py::arg("params"), py::arg("compute"))
      .def("begin_forward", &Precision::begin_forward, release)
      .def("end_forward", &Precision::end_forward, release);
  using engine::Reducer;
  py::class_<Reducer, std::shared_ptr<Reducer>>(m, "Reducer")
      .def(py::init(&make_reducer), release, py::arg("params"), py::arg("names"),
           py::arg("group_name"), py::arg("static_graph"), py::arg("fail_on_unused"),
           py::arg("skip_unused"), py::arg("check_finite") = false, py::arg("may_skip") = false,
           py::arg("precision") = nullptr, py::arg("leaves") = Tensors())
      .def("set_plan", &Reducer::set_plan, release, py::arg("specs"), py::arg("until") = -1,
           py::arg("keep") = false)
      .def("restore_plan", &Reducer::restore_plan, release, py::arg("number"))
      .def("keeps_plan", &Reducer::keeps_plan, release, py::arg("number"))
      .def("forget_plans", &Reducer::forget_plans, release)
      .def("on_plan_due", &Reducer::on_plan_due, release, py::arg("fn"))
      .def(
          "compare_every",
          [](Reducer& reducer, int64_t steps, std::function<void(std::vector<int64_t>)> differ,
             std::vector<int64_t> ranks, std::vector<size_t> sets) {
            reducer.compare_every(steps, std::move(differ), {std::move(ranks), std::move(sets)});
          },
          release, py::arg("steps"), py::arg("differ"), py::arg("ranks"), py::arg("sets"))
      .def("replica_digests", &Reducer::replica_digests, release)
      .def("accumulated", &Reducer::accumulated, release)
      .def("averaged", &Reducer::averaged, release)
      .def("prepare_forward", &Reducer::prepare_forward, release, py::arg("captured") = false)
      .def("prepare_local_forward", &Reducer::prepare_local_forward, release)
      .def("announce_backward", &Reducer::announce_backward, release)
      .def("recomputes", &Reducer::recomputes, release)
      .def("prepare_backward", &Reducer::prepare_backward, release, py::arg("outputs"),
           py::arg("sync") = true)
      .def("set_static_graph", &Reducer::set_static_graph, release)
      .def("set_divisor", &Reducer::set_divisor, release, py::arg("divisor"))
      .def("add_group", &Reducer::add_group, release, py::arg("group_name"), py::arg("divisor"))
      .def("use_weights", &use_weights, py::arg("begin_backward"), py::arg("start"),
           py::arg("scale"))
      .def("set_hook", &set_hook, py::arg("state"), py::arg("hook"), py::arg("flags_group"))
      .def("at_end", &Reducer::at_end, release, py::arg("action"))
      .def("shadow_step", &Reducer::shadow_step, release)
      .def("skip_step", &Reducer::skip_step, release)
      .def("on_skips", &Reducer::on_skips, py::arg("fn"))
      .def("note_optimizer", &Reducer::note_optimizer, release)
      .def("survive", &survive, py::arg("meet"), py::arg("rebuild"), py::arg("timeout"))
      .def("use_group", &Reducer::use_group, release, py::arg("group_name"))
      .def("use_shards", &Reducer::use_shards, release, py::arg("group_name"))
      .def("squares", &Reducer::squares, release, py::arg("params"), py::arg("units"))
      .def("start_gather", &Reducer::start_gather, release, py::arg("flat"))
      .def("finish_gathers", &Reducer::finish_gathers, release)
      .def("use_memory", &use_memory, release, py::arg("memory"), py::arg("group") = 0)
      .def("use_watch", &Reducer::use_watch, release, py::arg("watch"), py::arg("ranks"))
      .def("use_pipelines", &use_pipelines, release, py::arg("group_names"), py::arg("node_memory"),
           py::arg("group") = 0)
      .def("residuals", &residuals_of)
      .def("load_residuals", &load_residuals, py::arg("residuals"))
      .def("drop_parked", &Reducer::drop_parked, release, py::arg("params"))
      .def("resume", &Reducer::resume, release, py::arg("steps"))
      .def("detach_hooks", &Reducer::detach_hooks, release)
      .def("ready_order", &Reducer::ready_order, release)
      .def("trainable", &Reducer::trainable, release)
      .def("last_step", &last_step_dict)
      .def("step_timing", &Reducer::step_timing, release)
      .def("busy_seconds", &Reducer::busy_seconds, release)
      .def("await_buffers", &Reducer::await_buffers, py::arg("exchange"))
      .def("set_timeline", &Reducer::set_timeline, release, py::arg("timeline"))
      .def("used_counts", &Reducer::used_counts, release)
      .def("backward_running", &Reducer::backward_running)
      .def("nonfinite", &Reducer::nonfinite, release)
      .def("steps", &Reducer::steps)
      .def("wire_rate", &Reducer::wire_rate)
      .def("stats", &stats_dict);
}

}  // namespace

std::vector<at::Tensor> fastsync::tensors_of(const Optionals& given) {
  std::vector<at::Tensor> result;
  result.reserve(given.size());
  for (const auto& tensor : given) result.push_back(tensor.value_or(at::Tensor()));
  return result;
}

fastsync::Optionals fastsync::optionals_of(const std::vector<at::Tensor>& tensors) {
  Optionals result;
  for (const at::Tensor& tensor : tensors) {
    result.push_back(tensor.defined() ? std::optional(tensor) : std::nullopt);
  }
  return result;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "fastsync's C++ core; use the fastsync package instead";
  m.attr("with_cuda") = ops::with_cuda();
  bind_ops(m);
  bind_timeline(m);
  bind_specs(m);
  comm::bind_host_backend(m);
  bind_memory(m);
  bind_units(m);
  bind_watch(m);
  bind_engine(m);
}
