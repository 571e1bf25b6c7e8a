#include "binding/python_host.h"

#include <torch/csrc/Exceptions.h>

#include <string>

#include "core/host.h"

namespace py = pybind11;

namespace ringattn {
namespace {

PyObject* error_type = nullptr;
PyObject* logger = nullptr;

// The Python error that is set, as one that torch's operators let through.
[[noreturn]] void throw_python_error() {
  python_error error;
  error.persist();
  const std::string type = reinterpret_cast<PyTypeObject*>(error.type)->tp_name;
  error.message = error.message.empty() || error.message == "python_error" ? type : type + ": " + error.message;
  throw error;
}

// Python's handlers of signals run here; only on the main thread, as Python has it.
void check_interrupt() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw_python_error();
}

void warn(const std::string& text) {
  const py::gil_scoped_acquire gil;
  try {
    py::handle(logger).attr("warning")(text);
  } catch (py::error_already_set& error) {  // a handler of the log failed, which is no reason to stop waiting
    error.discard_as_unraisable("ringattn_ext: logging a warning");
  }
}

py::object number(std::int64_t value) { return value < 0 ? py::object(py::none()) : py::object(py::int_(value)); }

void raise(const RingError& error) {
  const py::gil_scoped_acquire gil;
  const Whereabouts& where = error.where();
  try {
    const py::object group = where.group.empty() ? py::object(py::none()) : py::object(py::str(where.group));
    const py::object raised = py::handle(error_type)(
        error.what(), py::arg("rank") = number(where.rank), py::arg("peer") = number(where.peer),
        py::arg("group") = group, py::arg("call") = number(where.call), py::arg("hop") = number(where.hop));
    PyErr_SetObject(error_type, raised.ptr());
  } catch (py::error_already_set& failed) {
    failed.restore();
  }
  throw_python_error();
}

}  // namespace

void host_in_python(py::object type) {
  error_type = type.release().ptr();
  logger = py::module_::import("logging").attr("getLogger")("ringattn_ext").release().ptr();
  host() = {check_interrupt, warn, raise};
}

}  // namespace ringattn
