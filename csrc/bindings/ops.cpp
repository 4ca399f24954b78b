// Bindings of kernels and what stands around them, by themselves.
#include "ops/ops.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "check.h"
#include "comm/collective.h"
#include "ops/checks.h"
#include "ops/codec_ops.h"
#include "ops/lossy_ops.h"

namespace py = pybind11;

namespace fastsync {
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

// A bucket as the engine packs it: its places are known, and its tensors are at hand.
class Bundle {
 public:
  Bundle(const Tensors& tensors, const std::vector<int64_t>& offsets)
      : items_(make_items({tensors.begin(), tensors.end()}, tensors, offsets)) {}

  void pack(const at::Tensor& flat, double scale) const { ops::pack(items_.items, flat, scale); }
  void unpack(const at::Tensor& flat, double scale) const {
    ops::unpack(items_.items, flat, scale, false);
  }

 private:
  Items items_;
};

void bind_bundle(py::module_& m) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  py::class_<Bundle>(m, "Bundle")
      .def(py::init<const Tensors&, const std::vector<int64_t>&>(), py::arg("tensors"),
           py::arg("offsets"))
      .def("pack", &Bundle::pack, release, py::arg("flat"), py::arg("scale"))
      .def("unpack", &Bundle::unpack, release, py::arg("flat"), py::arg("scale"));
}

ops::CodePlan one_chunk(const std::pair<std::string, int64_t>& plan) {
  return ops::one_chunk(format_named(plan.first), plan.second);
}

// The kernels by themselves, for benchmarks. `plan` is a format's name and the elements of the flat
// buffer.
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
}

}  // namespace

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
  m.def("architecture_problem", &ops::architecture_problem, py::arg("missing"));
  bind_bundle(m);
  bind_wire(m);
  bind_codecs(m);
  bind_lossy_ops(m);
}

}  // namespace fastsync
