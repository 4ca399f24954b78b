// Python bindings of the rendezvous store in a file, and of the backend of process groups.
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "bindings.h"
#include "comm/file_store.h"
#include "comm/host_backend.h"

namespace py = pybind11;

namespace fastsync {

void bind_store(py::module_& m) {
  py::class_<comm::FileStore, comm::FileStore::Interface, c10::intrusive_ptr<comm::FileStore>>(
      m, "FileStore")
      .def(py::init(
               [](const std::string& path) { return c10::make_intrusive<comm::FileStore>(path); }),
           py::arg("path"));
  comm::bind_host_backend(m);
}

}  // namespace fastsync
