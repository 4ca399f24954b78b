// Python bindings, and nothing else. c10d headers stay out: a process group arrives as the name it is registered under.
#include "bindings.h"

#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "comm/python_hook.h"
#include "comm/shm_collective.h"
#include "comm/shm_words.h"
#include "engine/reducer.h"
#include "ops/digests.h"
#include "ops/lossy_ops.h"
#include "ops/norms.h"
#include "ops/ops.h"

namespace py = pybind11;
using namespace fastsync;  // NOLINT: bindings only

namespace {

using Tensors = std::vector<at::Tensor>;

struct Items {
  std::vector<ops::SlotLayout> layouts;
  std::vector<ops::Item> items;
};

Items make_items(const std::vector<std::optional<at::Tensor>>& tensors, const Tensors& like,
                 const std::vector<int64_t>& offsets) {
  FS_CHECK_VALUE(tensors.size() == like.size() && like.size() == offsets.size(),
                 "expects as many tensors as layouts and offsets, but got ", tensors.size(), ", ",
                 like.size(), " and ", offsets.size());
  Items all;
  for (size_t i = 0; i < like.size(); ++i) {
    all.layouts.push_back(ops::SlotLayout::of(like[i], offsets[i]));
  }
  for (size_t i = 0; i < like.size(); ++i) {
    all.items.push_back({tensors[i].value_or(at::Tensor()), &all.layouts[i]});
  }
  return all;
}

void pack(const std::vector<std::optional<at::Tensor>>& tensors, const Tensors& like,
          const std::vector<int64_t>& offsets, const at::Tensor& flat, double scale) {
  const Items all = make_items(tensors, like, offsets);
  ops::pack(all.items, flat, scale);
}

void unpack(const Tensors& tensors, const std::vector<int64_t>& offsets, const at::Tensor& flat,
            double scale, bool accumulate) {
  const std::vector<std::optional<at::Tensor>> targets(tensors.begin(), tensors.end());
  const Items all = make_items(targets, tensors, offsets);
  ops::unpack(all.items, flat, scale, accumulate);
}

void bind_ops(py::module_& m) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  m.def("pack", &pack, release, py::arg("tensors"), py::arg("like"), py::arg("offsets"),
        py::arg("flat"), py::arg("scale"));
  m.def("unpack", &unpack, release, py::arg("tensors"), py::arg("offsets"), py::arg("flat"),
        py::arg("scale"), py::arg("accumulate"));
  m.def("square_sums", &ops::square_sums, release, py::arg("tensors"));
  m.def("all_finite", &ops::all_finite, release, py::arg("tensors"));
  m.def("digests", &ops::digests, release, py::arg("tensors"));
  m.def(
      "device_problem",
      [](const std::string& device) { return ops::device_problem(at::Device(device)); },
      py::arg("device"));
  m.def("driver_problem", &ops::driver_problem, py::arg("runtime"), py::arg("driver"));
#ifdef FASTSYNC_WITH_CUDA
  m.attr("with_cuda") = true;
#else
  m.attr("with_cuda") = false;
#endif
}

std::shared_ptr<engine::Reducer> make_reducer(const Tensors& params,
                                              const std::vector<std::string>& names,
                                              const std::string& group_name, bool static_graph,
                                              bool fail_on_unused, bool skip_unused,
                                              bool check_finite,
                                              std::shared_ptr<engine::Precision> precision) {
  engine::ReducerOptions options;
  options.static_graph = static_graph;
  options.fail_on_unused = fail_on_unused;
  options.skip_unused = skip_unused;
  options.check_finite = check_finite;
  // The last reference to a process group may be the reducer's. The group's end joins threads, and these may want the GIL to
  // free what Python lent them.
  return {new engine::Reducer(params, names, group_name, options, std::move(precision)),
          torch::impl::destroy_without_gil<engine::Reducer>};
}

void set_hook(engine::Reducer& reducer, py::object state, const py::object& hook,
              const std::string& flags_group) {
  auto wrapped = comm::make_python_hook(std::move(state), hook);
  const py::gil_scoped_release release;
  reducer.set_hook(std::move(wrapped), flags_group);
}

void at_end(engine::Reducer& reducer, std::function<void()> action) {
  const py::gil_scoped_release release;
  reducer.at_end(std::move(action));
}

using Optionals = std::vector<std::optional<at::Tensor>>;

Optionals optionals(const Tensors& tensors) {
  Optionals result;
  for (const at::Tensor& tensor : tensors) {
    result.push_back(tensor.defined() ? std::optional(tensor) : std::nullopt);
  }
  return result;
}

Tensors tensors_of(const Optionals& optionals) {
  Tensors result;
  for (const auto& tensor : optionals) result.push_back(tensor.value_or(at::Tensor()));
  return result;
}

std::map<std::string, Optionals> states_of(const engine::Reducer& reducer) {
  const engine::States states = [&] {
    const py::gil_scoped_release release;
    return reducer.states();
  }();
  std::map<std::string, Optionals> result;
  for (const auto& [name, tensors] : states) result[name] = optionals(tensors);
  return result;
}

void load_states(engine::Reducer& reducer, const std::map<std::string, Optionals>& given) {
  const py::gil_scoped_release release;
  engine::States states;
  for (const auto& [name, tensors] : given) states[name] = tensors_of(tensors);
  reducer.load_states(states);
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
      .def("dropped", &Timeline::dropped);
}

ops::CodePlan one_chunk(const std::pair<std::string, int64_t>& plan) {
  return ops::one_chunk(format_named(plan.first), plan.second);
}

// The kernels by themselves, for benchmarks. `plan` is a format's name and the elements of the flat buffer.
void bind_codecs(py::module_& m) {
  using Plan = std::pair<std::string, int64_t>;
  const auto release = py::call_guard<py::gil_scoped_release>();
  m.def(
      "encode",
      [](const Tensors& tensors, const std::vector<int64_t>& offsets, const at::Tensor& payload,
         const Plan& plan, double scale) {
        const Items all = make_items({tensors.begin(), tensors.end()}, tensors, offsets);
        ops::encode(all.items, at::Tensor(), payload, one_chunk(plan), {scale});
      },
      release, py::arg("tensors"), py::arg("offsets"), py::arg("payload"), py::arg("plan"),
      py::arg("scale"));
  m.def(
      "reduce",
      [](const at::Tensor& received, const at::Tensor& result, const Plan& plan) {
        ops::reduce(received, result, at::Tensor(), one_chunk(plan), 0, 0);
      },
      release, py::arg("received"), py::arg("result"), py::arg("plan"));
  m.def(
      "decode",
      [](const Tensors& tensors, const std::vector<int64_t>& offsets, const at::Tensor& payload,
         const Plan& plan) {
        const Items all = make_items({tensors.begin(), tensors.end()}, tensors, offsets);
        ops::decode(all.items, payload, one_chunk(plan), 1, 0, plan.second);
      },
      release, py::arg("tensors"), py::arg("offsets"), py::arg("payload"), py::arg("plan"));
}

void bind_wire(py::module_& m) {
  m.def(
      "format_traits",
      [](const std::string& name) {
        const kernels::FormatTraits traits = kernels::traits_of(format_named(name));
        return py::make_tuple(traits.block, traits.bits, traits.scale_bytes);
      },
      py::arg("name"));
  m.def(
      "wire_average",
      [](const Tensors& tensors, const std::string& format, bool gather) {
        return ops::wire_average(tensors, format_named(format), gather);
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("tensors"), py::arg("format"),
      py::arg("gather"));
  m.def(
      "probe_links",
      [](const std::string& group_name, const std::string& device, bool all_to_all,
         bool reduce_scatter) {
        comm::probe_links(*comm::Collective::resolve(group_name), at::Device(device),
                          {all_to_all, reduce_scatter});
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("group_name"), py::arg("device"),
      py::arg("all_to_all"), py::arg("reduce_scatter"));
}

// `by_torch`: what runs on devices for which there is no kernel.
void bind_lossy_ops(py::module_& m) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  m.def(
      "select_largest",
      [](const at::Tensor& values, const at::Tensor& positions, bool by_torch) {
        (by_torch ? ops::select_largest_by_torch : ops::select_largest)(values, positions);
      },
      release, py::arg("values"), py::arg("positions"), py::arg("by_torch") = false);
  m.def(
      "orthonormalise",
      [](const at::Tensor& vectors, const std::optional<at::Tensor>& refill, bool by_torch) {
        const at::Tensor others = refill.value_or(at::Tensor());
        if (by_torch) return ops::orthonormalise_by_torch(vectors, others);
        ops::orthonormalise({{vectors, others}});
      },
      release, py::arg("vectors"), py::arg("refill") = py::none(), py::arg("by_torch") = false);
  m.def(
      "low_rank_product",
      [](const std::pair<at::Tensor, at::Tensor>& factors, double share, const at::Tensor& matrix,
         const std::optional<at::Tensor>& residual, bool by_torch) {
        const at::Tensor lost = residual.value_or(at::Tensor());
        const auto& [left, right] = factors;
        if (by_torch) return ops::low_rank_product_by_torch(left, right, share, matrix, lost);
        ops::low_rank_product({{left, right, share, matrix, lost, at::Tensor()}});
      },
      release, py::arg("factors"), py::arg("share"), py::arg("matrix"),
      py::arg("residual") = py::none(), py::arg("by_torch") = false);
  m.def(
      "fill_random",
      [](const at::Tensor& values, uint64_t seed) { ops::fill_random({{values, seed}}); }, release,
      py::arg("values"), py::arg("seed"));
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
  using comm::SharedWords;
  py::class_<SharedWords, std::shared_ptr<SharedWords>>(m, "SharedWords")
      .def(py::init([](const SharedMemory& memory, size_t channel, double timeout) {
             const auto limit = std::chrono::duration<double>(timeout);
             return std::make_shared<SharedWords>(
                 memory, channel, std::chrono::duration_cast<std::chrono::milliseconds>(limit));
           }),
           py::arg("memory"), py::arg("channel"), py::arg("timeout"))
      .def("exchange", &SharedWords::exchange, release, py::arg("said"), py::arg("number"));
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

// The first and the last link of a hierarchical chain join the ranks of a node, who may share memory.
void use_chains(engine::Reducer& reducer, const std::vector<std::string>& group_names,
                const std::shared_ptr<comm::SharedMemory>& node_memory) {
  std::vector<std::shared_ptr<comm::Collective>> links;
  for (const std::string& name : group_names) links.push_back(comm::Collective::resolve(name));
  if (node_memory) {
    links.front() = std::make_shared<comm::ShmCollective>(node_memory, 0);
    links.back() = std::make_shared<comm::ShmCollective>(node_memory, 1);
  }
  reducer.use_chains(std::move(links));
}

void bind_engine(py::module_& m) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  py::class_<engine::ForwardAdvice>(m, "ForwardAdvice")
      .def_readonly("regrouped", &engine::ForwardAdvice::regrouped)
      .def_readonly("unused", &engine::ForwardAdvice::unused)
      .def_readonly("paced", &engine::ForwardAdvice::paced);
  using engine::Precision;
  py::class_<Precision, std::shared_ptr<Precision>>(m, "Precision")
      .def(py::init<Tensors, at::ScalarType>(), py::arg("params"), py::arg("compute"))
      .def("begin_forward", &Precision::begin_forward, release)
      .def("end_forward", &Precision::end_forward, release);
  using engine::Reducer;
  py::class_<Reducer, std::shared_ptr<Reducer>>(m, "Reducer")
      .def(py::init(&make_reducer), release, py::arg("params"), py::arg("names"),
           py::arg("group_name"), py::arg("static_graph"), py::arg("fail_on_unused"),
           py::arg("skip_unused"), py::arg("check_finite") = false, py::arg("precision") = nullptr)
      .def("set_plan", &Reducer::set_plan, release, py::arg("specs"), py::arg("until") = -1,
           py::arg("keep") = false)
      .def("set_until", &Reducer::set_until, release, py::arg("until"))
      .def("restore_plan", &Reducer::restore_plan, release, py::arg("number"))
      .def("keeps_plan", &Reducer::keeps_plan, release, py::arg("number"))
      .def("forget_plans", &Reducer::forget_plans, release)
      .def("on_plan_due", &Reducer::on_plan_due, release, py::arg("fn"))
      .def("compare_every", &Reducer::compare_every, release, py::arg("steps"), py::arg("fn"))
      .def("prepare_forward", &Reducer::prepare_forward, release, py::arg("captured") = false)
      .def("prepare_local_forward", &Reducer::prepare_local_forward, release)
      .def("prepare_backward", &Reducer::prepare_backward, release, py::arg("outputs"),
           py::arg("sync") = true)
      .def("set_static_graph", &Reducer::set_static_graph, release)
      .def("set_divisor", &Reducer::set_divisor, release, py::arg("divisor"))
      .def("set_hook", &set_hook, py::arg("state"), py::arg("hook"), py::arg("flags_group"))
      .def("at_end", &at_end, py::arg("action"))
      .def("shadow_step", &Reducer::shadow_step, release)
      .def("use_group", &Reducer::use_group, release, py::arg("group_name"))
      .def("use_shards", &Reducer::use_shards, release, py::arg("group_name"))
      .def("squares", &Reducer::squares, release, py::arg("params"), py::arg("units"))
      .def("start_gather", &Reducer::start_gather, release, py::arg("flat"))
      .def("finish_gathers", &Reducer::finish_gathers, release)
      .def(
          "use_memory",
          [](Reducer& reducer, const std::shared_ptr<comm::SharedMemory>& memory) {
            if (!memory) {
              return reducer.use_memory(nullptr, nullptr, std::make_shared<ops::BufferPool>());
            }
            const auto regions = std::make_shared<comm::ShmCollective>(memory, 1);
            reducer.use_memory(std::make_shared<comm::ShmCollective>(memory, 0), regions,
                               regions->pool());
          },
          release, py::arg("memory"))
      .def("use_watch", &Reducer::use_watch, release, py::arg("watch"))
      .def("use_chains", &use_chains, release, py::arg("group_names"), py::arg("node_memory"))
      .def("states", &states_of)
      .def("load_states", &load_states, py::arg("states"))
      .def("drop_parked", &Reducer::drop_parked, release, py::arg("name"), py::arg("params"))
      .def("resume", &Reducer::resume, release, py::arg("steps"))
      .def("detach_hooks", &Reducer::detach_hooks, release)
      .def("ready_order", &Reducer::ready_order, release)
      .def("trainable", &Reducer::trainable, release)
      .def("last_step", &last_step_dict)
      .def("pace", &Reducer::pace, release)
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

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "fastsync's C++ core; use the fastsync package instead";
  bind_ops(m);
  bind_timeline(m);
  bind_wire(m);
  bind_codecs(m);
  bind_lossy_ops(m);
  bind_specs(m);
  bind_memory(m);
  bind_units(m);
  bind_watch(m);
  bind_engine(m);
}
