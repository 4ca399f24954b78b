// Python bindings of units: parameters that ranks share.
#include <pybind11/functional.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "bindings/bindings.h"
#include "fsdp/param_group.h"
#include "reducer/autograd_hooks.h"
#include "shm/messages.h"

namespace py = pybind11;

namespace fastsync {
namespace {

using engine::Unit;
using engine::UnitLayout;
using engine::UnitLinks;

std::shared_ptr<UnitLinks> make_links(const std::string& group_name,
                                      const std::shared_ptr<comm::SharedMemory>& memory,
                                      int64_t mark) {
  std::shared_ptr<comm::Collective> ranks = comm::Collective::resolve(group_name);
  if (memory) ranks = std::make_shared<comm::ShmMessages>(std::move(ranks), memory);
  // The end of the group's last reference joins threads that may want the GIL.
  return {new UnitLinks(std::move(ranks), mark), torch::impl::destroy_without_gil<UnitLinks>};
}

UnitLayout make_layout(const std::vector<std::tuple<size_t, int64_t, bool>>& places, int64_t chunk,
                       int64_t packed, int64_t flags, std::optional<engine::CodedSpec> codes) {
  UnitLayout layout;
  for (const auto& [member, offset, direct] : places) {
    layout.places.push_back({member, offset, direct});
  }
  layout.chunk = chunk;
  layout.packed = packed;
  layout.flags = flags;
  layout.codes = std::move(codes);
  return layout;
}

std::shared_ptr<Unit> make_unit(
    std::shared_ptr<UnitLinks> links,
    const std::vector<std::tuple<std::vector<int64_t>, int64_t, int64_t>>& members,
    const std::tuple<at::ScalarType, at::ScalarType, at::ScalarType>& dtypes,
    const std::string& device, int tag) {
  std::vector<engine::UnitMember> made;
  for (const auto& [sizes, dim, offset] : members) made.push_back({sizes, dim, offset});
  const auto& [stored, compute, reduce] = dtypes;
  // Its end waits for threads that may want the GIL.
  return {new Unit(std::move(links), std::move(made), engine::UnitDTypes{stored, compute, reduce},
                   at::Device(device), tag),
          torch::impl::destroy_without_gil<Unit>};
}

py::dict stats_of(const engine::UnitPeers& peers) {
  const engine::UnitStats& stats = peers.stats;
  py::dict result;
  result["gathers"] = stats.gathers;
  result["reductions"] = stats.reductions;
  result["gathered_bytes"] = stats.gathered_bytes;
  result["reduced_bytes"] = stats.reduced_bytes;
  result["summed_bytes"] = stats.summed_bytes;
  result["waited_seconds"] = stats.waited_seconds;
  return result;
}

engine::Direction direction_of(const std::string& name) {
  if (name == "gather") return engine::Direction::kGather;
  return name == "reduction" ? engine::Direction::kReduce : engine::Direction::kSum;
}

// Keeps the autograd node alive whose hook watches the gradients of a tensor.
struct WatchedGradient {
  std::shared_ptr<void> node;
};

// Autograd passes the outputs of a module before it reaches the parameters, unless the script hides
// these outputs. A gradient that arrives unannounced would stay on this rank, so `unannounced` is
// called before it is accumulated.
class UnitGradients {
 public:
  explicit UnitGradients(std::function<void()> unannounced)
      : state_(std::make_shared<State>(std::move(unannounced))) {}

  // Watches the gradients of `whole` as long as the returned object lives.
  WatchedGradient watch(const at::Tensor& whole) const {
    return {engine::before_accumulation(
        whole, [state = state_](const at::Tensor& /*grad*/, bool /*ours*/) {
          if (!state->announced) state->unannounced();
        })};
  }
  // Whether the running backward has been announced.
  void announce(bool whether) { state_->announced = whether; }

 private:
  struct State {
    explicit State(std::function<void()> fn) : unannounced(std::move(fn)) {}
    std::atomic<bool> announced{false};
    std::function<void()> unannounced;
  };
  std::shared_ptr<State> state_;
};

// Records of units: their log, and collectives that Python waits for.
void bind_logs(py::module_& m) {
  using engine::Transfer;
  using engine::UnitLog;
  using engine::UnitName;
  using engine::UnitPeers;
  const auto release = py::call_guard<py::gil_scoped_release>();
  py::class_<UnitLog, std::shared_ptr<UnitLog>>(m, "UnitLog")
      .def(py::init<>())
      .def("begin_forward", &UnitLog::begin_forward, py::arg("counts"), py::arg("evaluates"))
      .def("end_forward", &UnitLog::end_forward)
      .def("begin_backward", &UnitLog::begin_backward)
      .def("end_backward", &UnitLog::end_backward)
      .def("end_work", &UnitLog::end_work)
      .def("set_timeline", &UnitLog::set_timeline, py::arg("timeline"))
      .def("steps", &UnitLog::steps);
  py::class_<UnitName>(m, "UnitName")
      .def(py::init([](int64_t number, std::string words, std::vector<std::string> parameters) {
             return UnitName{number, std::move(words), std::move(parameters)};
           }),
           py::arg("number"), py::arg("words"), py::arg("parameters"));
  py::class_<Transfer>(m, "Transfer")
      .def("begin_wait", &Transfer::begin_wait)
      .def("end_wait", &Transfer::end_wait)
      .def("look", &Transfer::look, release)
      .def("arrived", &Transfer::arrived)
      .def("fail", &Transfer::fail, release, py::arg("error"));
  py::class_<UnitPeers, std::shared_ptr<UnitPeers>>(m, "UnitPeers")
      .def(py::init<int64_t>(), py::arg("rank"))
      .def(
          "join",
          [](UnitPeers& peers, std::shared_ptr<UnitLog> log,
             std::shared_ptr<engine::FaultWatch> faults, engine::Names names,
             const std::string& device) {
            peers.join(std::move(log), std::move(faults), std::move(names), at::Device(device));
          },
          py::arg("log"), py::arg("faults").none(true), py::arg("names"), py::arg("device"))
      .def(
          "begin",
          [](std::shared_ptr<UnitPeers> peers, const UnitName& unit, const std::string& direction,
             int64_t bytes) {
            return std::make_unique<Transfer>(std::move(peers),
                                              std::make_shared<const UnitName>(unit),
                                              direction_of(direction), bytes);
          },
          release, py::arg("unit"), py::arg("direction"), py::arg("bytes"))
      .def("stats", &stats_of);
}

}  // namespace

void bind_units(py::module_& m) {
  bind_logs(m);
  const auto release = py::call_guard<py::gil_scoped_release>();
  py::class_<UnitLinks, std::shared_ptr<UnitLinks>>(m, "UnitLinks")
      .def(py::init(&make_links), release, py::arg("group_name"), py::arg("memory"),
           py::arg("mark"))
      .def("trim", &UnitLinks::trim, release)
      .def("most_bytes", [](const UnitLinks& links) { return links.pool.most(); })
      .def("peers", [](const UnitLinks& links) { return links.peers; });
  py::class_<WatchedGradient>(m, "WatchedGradient");
  py::class_<UnitGradients>(m, "UnitGradients")
      .def(py::init<std::function<void()>>(), py::arg("unannounced"))
      .def("watch", &UnitGradients::watch, py::arg("whole"))
      .def("announce", &UnitGradients::announce, py::arg("whether"));
  py::class_<UnitLayout>(m, "UnitLayout")
      .def(py::init(&make_layout), py::arg("places"), py::arg("chunk"), py::arg("packed"),
           py::arg("flags"), py::arg("codes"));
  py::class_<Unit, std::shared_ptr<Unit>>(m, "Unit")
      .def(py::init(&make_unit), py::arg("links"), py::arg("members"), py::arg("dtypes"),
           py::arg("device"), py::arg("tag"))
      .def("set_name", &Unit::set_name, py::arg("name"))
      .def("whole", &Unit::whole, py::arg("member"))
      .def("set_shard", &Unit::set_shard, release, py::arg("shard"), py::arg("layout"))
      .def("start_gather", &Unit::start_gather, release)
      .def("finish_gather", &Unit::finish_gather, release)
      .def("allocate", &Unit::allocate, release)
      .def("is_gathered", &Unit::is_gathered)
      .def("release", &Unit::release, release)
      .def(
          "start_reduce",
          [](Unit& unit, const UnitLayout& layout, Optionals gradients,
             const std::variant<double, at::Tensor>& scale) {
            auto tensors = tensors_of(gradients);
            gradients.clear();
            unit.start_reduce(layout, std::move(tensors),
                              std::visit([](const auto& by) { return ops::Scale(by); }, scale));
          },
          release, py::arg("layout"), py::arg("gradients"), py::arg("scale"))
      .def("finish_reduce", &Unit::finish_reduce, release)
      .def(
          "deliver",
          [](const Unit& unit, const UnitLayout& layout, const at::Tensor& sums,
             const Optionals& before, bool missed) {
            return optionals_of(unit.deliver(layout, sums, tensors_of(before), missed));
          },
          release, py::arg("layout"), py::arg("sums"), py::arg("before"), py::arg("missed"));
}

}  // namespace fastsync
