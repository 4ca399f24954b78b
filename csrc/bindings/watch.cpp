// Python bindings of the watch for other ranks' faults, and of step timing.
#include <signal.h>
#include <torch/csrc/Exceptions.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "check.h"
#include "comm/collective.h"
#include "fault/fault_watch.h"
#include "fault/process.h"

namespace py = pybind11;

namespace fastsync {
namespace {

using engine::Fault;
using engine::FaultWatch;
using engine::WaitScope;

// Host, port, key, process, machine.
using Address = std::tuple<std::string, int64_t, uint64_t, int64_t, std::string>;

// Throws as torch throws exceptions of Python code: they travel through autograd's threads to the
// caller of backward().
[[noreturn]] void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}

FaultWatch::Interpreter interpreter_of(py::function make_error) {
  // Dropped with the GIL, on any thread.
  const std::shared_ptr<py::function> make(new py::function(std::move(make_error)),
                                           [](const py::function* function) {
                                             const py::gil_scoped_acquire gil;
                                             delete function;
                                           });
  FaultWatch::Interpreter result;
  result.raise = [make](const Fault& fault) {
    const py::gil_scoped_acquire gil;
    const py::object error = (*make)(fault.text, fault.ranks, fault.phase, fault.bucket,
                                     fault.parameters, fault.seconds, fault.reason);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    throw_python_error();
  };
  result.check_signals = [] {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw_python_error();
  };
  return result;
}

std::shared_ptr<FaultWatch> make_watch(const std::string& host, double warn_after,
                                       double lost_after, int stack_file, int stack_signal,
                                       py::function make_error) {
  FaultWatch::Options options;
  options.warn_after = warn_after;
  options.lost_after = lost_after;
  options.stack_file = stack_file;
  options.stack_signal = stack_signal;
  return std::make_shared<FaultWatch>(host, options, interpreter_of(std::move(make_error)));
}

std::vector<int64_t> connect(FaultWatch& watch, const std::vector<Address>& addresses,
                             int64_t rank) {
  std::vector<engine::Member> members;
  for (const auto& [host, port, key, process, machine] : addresses) {
    members.push_back({{host, port, key}, process, machine});
  }
  return watch.connect(std::move(members), rank);
}

std::unique_ptr<WaitScope> wait_scope(std::shared_ptr<FaultWatch> watch, const std::string& kind,
                                      const std::string& label, std::vector<int64_t> ranks) {
  const auto known = kind == "together"   ? WaitScope::Kind::kTogether
                     : kind == "wrapping" ? WaitScope::Kind::kWrapping
                                          : WaitScope::Kind::kApart;
  return std::make_unique<WaitScope>(std::move(watch), known, label, std::move(ranks));
}

}  // namespace

void bind_watch(py::module_& m) {
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(std::move(thrown));
    } catch (python_error& error) {
      error.restore();
    }
  });
  py::class_<engine::StepTimingRecord>(m, "StepTimingRecord")
      .def_readonly("rank", &engine::StepTimingRecord::rank)
      .def_readonly("times", &engine::StepTimingRecord::times);
  py::class_<engine::StepTimingReport>(m, "StepTimingReport")
      .def_readonly("steps", &engine::StepTimingReport::steps)
      .def_readonly("earliest", &engine::StepTimingReport::earliest);
  const auto release = py::call_guard<py::gil_scoped_release>();
  m.def(
      "process_has_ended", [](int64_t process) { return !engine::end_of_process(process).lives; },
      release, py::arg("process"));
  m.def(
      "leave_pipelines",
      [](double seconds) {
        comm::leave_pipelines(std::chrono::milliseconds(std::llround(seconds * 1e3)));
      },
      release, py::arg("seconds"));
  py::class_<FaultWatch, std::shared_ptr<FaultWatch>>(m, "FaultWatch")
      .def(py::init(&make_watch), py::arg("host"), py::arg("warn_after"), py::arg("lost_after"),
           py::arg("stack_file"), py::arg("stack_signal"), py::arg("make_error"))
      .def("address",
           [](const FaultWatch& watch) {
             const comm::PeerAddress& at = watch.address();
             return std::make_tuple(at.host, at.port, at.key);
           })
      .def("connect", &connect, release, py::arg("addresses"), py::arg("rank"))
      .def("wait_scope", &wait_scope, py::arg("kind"), py::arg("label"), py::arg("ranks"))
      .def(
          "watch_over",
          [](FaultWatch& watch, const std::string& group_name, const std::string& device) {
            watch.add_communicator(comm::communicator_of(group_name, at::Device(device)));
          },
          py::arg("group_name"), py::arg("device"))
      .def("gone", &FaultWatch::gone, release)
      .def("questions", &FaultWatch::questions, release)
      .def("survive", &FaultWatch::survive)
      .def(
          "leave",
          [](FaultWatch& watch, const std::string& how, const std::string& why) {
            const auto kind = how == "raises"     ? engine::Leaving::kRaises
                              : how == "gives up" ? engine::Leaving::kGivesUp
                                                  : engine::Leaving::kEnds;
            watch.leave(kind, why);
          },
          release, py::arg("how"), py::arg("why"))
      .def(
          "wait_for_peer_exit",
          [](const FaultWatch& watch, double seconds) {
            watch.wait_for_peer_exit(std::chrono::milliseconds(std::llround(seconds * 1e3)));
          },
          release, py::arg("seconds"))
      .def("close", &FaultWatch::close, release)
      .def("abandon", &FaultWatch::abandon);
  py::class_<WaitScope>(m, "WaitScope")
      .def("look", &WaitScope::look, release)
      .def("explain", &WaitScope::explain, release, py::arg("error"))
      .def("end", &WaitScope::end, py::arg("came"));
}

}  // namespace fastsync
