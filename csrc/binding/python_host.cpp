#include "binding/python_host.h"

#include <torch/csrc/Exceptions.h>

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <optional>
#include <string>

#include "core/host.h"

namespace py = pybind11;

namespace ringattn {
namespace {

PyObject* error_type = nullptr;
PyObject* is_inherited = nullptr;
PyObject* logger = nullptr;
std::atomic<unsigned long> main_thread = 0;

bool is_main_thread() { return main_thread == static_cast<unsigned long>(::pthread_self()); }

bool python_ends() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Python ends a thread that asks for the GIL when Python itself ends, in a way that does not get past a catch or a
// noexcept: such a thread waits for the end of the process instead.
void stay_when_python_ends() {
  while (!is_main_thread() && python_ends()) ::pause();
}

class Gil {
 public:
  Gil() {
    stay_when_python_ends();
    gil_.emplace();
  }

 private:
  std::optional<py::gil_scoped_acquire> gil_;
};

// The Python error that is set, as one that torch's operators let through.
[[noreturn]] void throw_python_error() {
  python_error error;
  error.persist();
  const std::string type = reinterpret_cast<PyTypeObject*>(error.type)->tp_name;
  error.message = error.message.empty() || error.message == "python_error" ? type : type + ": " + error.message;
  throw error;
}

// Unless the user asks for an end.
void discard(py::error_already_set& error, const char* context) {
  if (!error.matches(PyExc_Exception)) {
    error.restore();
    throw_python_error();
  }
  error.discard_as_unraisable(context);
}

// Python's handlers of signals run here; only on the main thread, as Python has it.
void check_interrupt() {
  if (!is_main_thread()) return;
  const Gil gil;
  if (PyErr_CheckSignals() != 0) throw_python_error();
}

void warn(const std::string& text) {
  const Gil gil;
  try {
    py::handle(logger).attr("warning")(text);
  } catch (py::error_already_set& error) {  // no reason to stop waiting
    discard(error, "ringattn_ext: logging a warning");
  }
}

bool asks_is_inherited(const std::string& group) {
  const Gil gil;
  try {
    return py::handle(is_inherited)(group).cast<bool>();
  } catch (py::error_already_set& error) {
    discard(error, "ringattn_ext: looking for groups of the parent process");
    return false;
  }
}

py::object number(std::int64_t value) { return value < 0 ? py::object(py::none()) : py::object(py::int_(value)); }

void raise(const RingError& error) {
  const Gil gil;
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

void main_thread_is(unsigned long identifier) { main_thread = identifier; }

void host_in_python(py::object type, py::object inherited) {
  error_type = type.release().ptr();
  is_inherited = inherited.release().ptr();
  logger = py::module_::import("logging").attr("getLogger")("ringattn_ext").release().ptr();
  host() = {check_interrupt, warn, asks_is_inherited, stay_when_python_ends, raise};
}

}  // namespace ringattn
