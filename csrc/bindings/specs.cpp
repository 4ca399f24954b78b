// Python bindings of what a plan says about buckets, users' codecs among it.
#include <pybind11/functional.h>

#include <array>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "check.h"
#include "codec_plugin.h"
#include "reducer/autograd_hooks.h"
#include "transport/choose.h"

namespace py = pybind11;

namespace fastsync {

kernels::Format format_named(const std::string& name) {
  for (int i = 0; i < kernels::kFormats; ++i) {
    const auto format = static_cast<kernels::Format>(i);
    if (name == kernels::name_of(format)) return format;
  }
  throw std::invalid_argument(concat("fastsync: no wire format is named ", name));
}

namespace {

engine::BucketSpec make_spec(const std::vector<std::pair<int64_t, int64_t>>& slots, int64_t numel,
                             int64_t flags_offset, at::ScalarType dtype, bool views, bool sparse,
                             std::optional<engine::CodedSpec> coded,
                             std::optional<engine::ScatterSpec> scatter, size_t group) {
  engine::BucketSpec spec;
  for (const auto& [param, offset] : slots) spec.slots.push_back({param, offset});
  spec.flat = {numel, flags_offset, dtype, views};
  spec.sparse = sparse;
  spec.coded = std::move(coded);
  spec.scatter = std::move(scatter);
  spec.group = group;
  return spec;
}

// A codec in a shared library of the user; `table` lives as long as the process.
class PluginCodec final : public engine::Codec {
 public:
  explicit PluginCodec(const fastsync_codec* table) : table_(table) {
    FS_CHECK_VALUE(table != nullptr && table->version == FASTSYNC_CODEC_VERSION,
                   "expects a codec table of version ", FASTSYNC_CODEC_VERSION);
  }

  void encode(const at::Tensor& values, const at::Tensor& payload) override {
    check_host(values);
    check("encode",
          table_->encode(table_->context, values.mutable_data_ptr<float>(), values.numel(),
                         payload.mutable_data_ptr<uint8_t>(), payload.numel()));
  }

  void decode(const at::Tensor& payload, const at::Tensor& values) override {
    check_host(values);
    check("decode",
          table_->decode(table_->context, payload.const_data_ptr<uint8_t>(), payload.numel(),
                         values.mutable_data_ptr<float>(), values.numel()));
  }

 private:
  void check_host(const at::Tensor& values) const {
    FS_CHECK(values.is_cpu(), "the codec ", table_->name, " works on the CPU, not on ",
             values.device());
  }
  void check(const char* what, const char* error) const {
    FS_CHECK(error == nullptr, "the codec ", table_->name, " failed to ", what, ": ", error);
  }

  const fastsync_codec* table_;
};

// A codec written in Python, with encode(values, payload) and decode(payload, values), as
// fastsync.Codec describes them.
// Called without the GIL, on the threads of the backward and of the pipelines.
class PythonCodec final : public engine::Codec {
 public:
  explicit PythonCodec(py::object codec) : codec_(std::move(codec)) {}

  ~PythonCodec() override {
    const py::gil_scoped_acquire gil;
    codec_ = py::object();
  }
  PythonCodec(const PythonCodec&) = delete;
  PythonCodec& operator=(const PythonCodec&) = delete;

  void encode(const at::Tensor& values, const at::Tensor& payload) override {
    call("encode", values, payload);
  }
  void decode(const at::Tensor& payload, const at::Tensor& values) override {
    call("decode", payload, values);
  }

 private:
  void call(const char* method, const at::Tensor& from, const at::Tensor& to) {
    const py::gil_scoped_acquire gil;
    try {
      codec_.attr(method)(from, to);
    } catch (py::error_already_set& error) {
      // The exception object must not leave the GIL.
      throw std::runtime_error(std::string("the codec's ") + method + "() raised " + error.what());
    }
  }

  py::object codec_;
};

void bind_coded(py::module_& m) {
  using engine::CodedSpec;
  py::class_<CodedSpec>(m, "CodedSpec")
      .def(py::init<>())
      .def_property(
          "format", [](const CodedSpec& spec) { return kernels::name_of(spec.format); },
          [](CodedSpec& spec, const std::string& name) { spec.format = format_named(name); })
      .def(
          "use_codec",
          [](CodedSpec& spec, py::object codec) {
            spec.codec = std::make_shared<PythonCodec>(std::move(codec));
          },
          py::arg("codec"))
      .def(
          "use_plugin",
          [](CodedSpec& spec, uintptr_t table) {
            // NOLINTNEXTLINE: the address that the library's entry returned
            spec.codec =
                std::make_shared<PluginCodec>(reinterpret_cast<const fastsync_codec*>(table));
          },
          py::arg("table"))
      .def(
          "lay_out",
          [](CodedSpec& spec, int64_t pieces, int64_t chunk_numel, int64_t coded_bytes,
             int64_t flags_offset, int64_t flags_per_chunk, int64_t chunk_bytes) {
            spec.pieces = pieces;
            spec.chunk_numel = chunk_numel;
            spec.coded_bytes = coded_bytes;
            spec.flags_offset = flags_offset;
            spec.flags_per_chunk = flags_per_chunk;
            spec.chunk_bytes = chunk_bytes;
          },
          py::arg("pieces"), py::arg("chunk_numel"), py::arg("coded_bytes"),
          py::arg("flags_offset"), py::arg("flags_per_chunk"), py::arg("chunk_bytes"))
      .def_readwrite("kept", &CodedSpec::kept)
      .def_readwrite("gather", &CodedSpec::gather)
      .def_readwrite("node_ranks", &CodedSpec::node_ranks)
      .def_readwrite("node_rank", &CodedSpec::node_rank)
      .def_readwrite("nodes", &CodedSpec::nodes)
      .def_readwrite("node", &CodedSpec::node)
      .def_readwrite("error_feedback", &CodedSpec::error_feedback)
      .def_readwrite("stochastic", &CodedSpec::stochastic)
      .def_readwrite("seed", &CodedSpec::seed);
}

// Faces as Python holds them, with the number of references that the Python object of each has
// without other holders.
class ProxyList {
 public:
  ProxyList(py::list proxies, std::vector<at::Tensor>& tensors) : proxies_(std::move(proxies)) {
    for (const py::handle proxy : proxies_) tensors.push_back(proxy.cast<at::Tensor>());
    for (size_t i = 0; i < tensors.size(); ++i) references_.push_back(references(i));
  }
  ProxyList(const ProxyList&) = delete;
  ProxyList& operator=(const ProxyList&) = delete;
  ~ProxyList() {
    const py::gil_scoped_acquire gil;
    proxies_.release().dec_ref();
  }

  bool is_held(size_t index) const { return references(index) > references_[index]; }

 private:
  Py_ssize_t references(size_t index) const {
    return Py_REFCNT(PyList_GET_ITEM(proxies_.ptr(), static_cast<Py_ssize_t>(index)));
  }

  py::list proxies_;
  std::vector<Py_ssize_t> references_;
};

// A parameter that is frozen now gets no hook: its gradients are copied.
void announce_gradients(const std::shared_ptr<engine::ShardedGradients>& unit) {
  const std::weak_ptr<engine::ShardedGradients> weak = unit;
  for (size_t i = 0; i < unit->params.size(); ++i) {
    if (!unit->params[i].requires_grad()) continue;
    auto announce = [weak, i](const at::Tensor& grad, bool ours) {
      const auto self = weak.lock();
      if (!self || !self->proxies[i].is_same(self->params[i].grad())) return;
      self->announce(i, ours ? grad : at::Tensor());
    };
    unit->hooks.push_back(engine::before_accumulation(unit->params[i], std::move(announce)));
  }
}

std::shared_ptr<engine::ShardedGradients> make_sharded_gradients(
    const at::Tensor& shard, const std::vector<at::Tensor>& params, const py::list& proxies,
    std::function<void(size_t)> release) {
  auto made = std::make_shared<engine::ShardedGradients>(shard, params);
  const auto list = std::make_shared<ProxyList>(proxies, made->proxies);
  FS_CHECK_VALUE(made->proxies.size() == params.size(), "expects one proxy per parameter");
  made->is_held = [list](size_t index) { return list->is_held(index); };
  made->release = std::move(release);
  announce_gradients(made);
  return made;
}

void bind_shards(py::module_& m) {
  using engine::ScatterSpec;
  using engine::ShardedGradients;
  py::class_<ShardedGradients, std::shared_ptr<ShardedGradients>>(m, "ShardedGradients")
      .def(py::init(&make_sharded_gradients), py::arg("shard"), py::arg("params"),
           py::arg("proxies"), py::arg("release"))
      .def(
          "set_proxy",
          [](ShardedGradients& self, size_t index, const at::Tensor& proxy) {
            self.proxies.at(index) = proxy;
          },
          py::arg("index"), py::arg("proxy"))
      .def(
          "pending",
          [](const ShardedGradients& self, size_t index) -> std::optional<at::Tensor> {
            const at::Tensor& pending = self.pending.at(index);
            return pending.defined() ? std::optional(pending) : std::nullopt;
          },
          py::arg("index"))
      .def(
          "set_pending",
          [](ShardedGradients& self, size_t index, const std::optional<at::Tensor>& pending) {
            self.pending.at(index) = pending.value_or(at::Tensor());
          },
          py::arg("index"), py::arg("pending"))
      .def("add", &ShardedGradients::add, py::arg("index"), py::arg("grad"),
           py::call_guard<py::gil_scoped_release>());
  py::class_<engine::GradientSquares>(m, "GradientSquares")
      .def_readonly("owned", &engine::GradientSquares::owned)
      .def_readonly("common", &engine::GradientSquares::common)
      .def_readonly("wide", &engine::GradientSquares::wide)
      .def_readonly("tensors", &engine::GradientSquares::tensors)
      .def_readonly("spread", &engine::GradientSquares::spread)
      .def_readonly("all_spread", &engine::GradientSquares::all_spread);
  py::class_<ScatterSpec>(m, "ScatterSpec")
      .def(py::init([](std::shared_ptr<ShardedGradients> gradients, std::vector<size_t> members,
                       int64_t first, std::array<int64_t, 4> layout) {
             const auto [chunks, mine, numel, flags] = layout;
             return ScatterSpec{
                 std::move(gradients), std::move(members), first, {chunks, mine, numel, flags}, {}};
           }),
           py::arg("gradients"), py::arg("members"), py::arg("first"), py::arg("layout"))
      .def(
          "add_part",
          [](ScatterSpec& spec, size_t slot, int64_t chunk, int64_t begin, int64_t numel,
             int64_t place) { spec.parts.push_back({slot, chunk, begin, numel, place}); },
          py::arg("slot"), py::arg("chunk"), py::arg("begin"), py::arg("numel"), py::arg("place"));
}

}  // namespace

void bind_specs(py::module_& m) {
  bind_coded(m);
  bind_shards(m);
  py::class_<engine::BucketSpec>(m, "BucketSpec")
      .def(py::init(&make_spec), py::arg("slots"), py::arg("numel"), py::arg("flags_offset"),
           py::arg("dtype"), py::arg("views"), py::arg("sparse"), py::arg("coded") = py::none(),
           py::arg("scatter") = py::none(), py::arg("group") = 0);
}

}  // namespace fastsync
