#include "python_codec.h"

#include <utility>

namespace fastsync::engine {
namespace {

namespace py = pybind11;

// Called without the GIL, on the threads of the backward and of the pipelines.
class PythonCodec final : public Codec {
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

}  // namespace

std::shared_ptr<Codec> make_python_codec(pybind11::object codec) {
  return std::make_shared<PythonCodec>(std::move(codec));
}

}  // namespace fastsync::engine
