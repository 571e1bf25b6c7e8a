// The double for Python: machine.py says what the functions mean.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "native/group.h"
#include "native/kernels.h"
#include "native/machine.h"

namespace py = pybind11;
using namespace streams;

namespace {

// (kernel, grid, threads, shared bytes, parameters), and (address, host pointer, bytes, name, read only)
void set_python_runner(const py::object& run, int arch) {
  if (run.is_none()) return set_runner(nullptr, arch);
  // Kept for ever: the last reference could go when Python is gone.
  const auto* kept = new py::object(run);
  set_runner(
      [kept](const std::vector<ringattn::cuda::LaunchPlan>& plans, const std::vector<Region>& regions) {
        const py::gil_scoped_acquire lock;
        py::list launches, memory;
        for (const auto& plan : plans) {
          launches.append(py::make_tuple(plan.kernel, plan.grid, plan.threads, plan.shared_bytes,
                                         py::bytes(reinterpret_cast<const char*>(&plan.params), sizeof(plan.params))));
        }
        for (const Region& one : regions) {
          memory.append(py::make_tuple(one.address, one.host, one.bytes, one.name, one.read_only));
        }
        (*kept)(launches, memory);
      },
      arch);
}

void bind_log(py::module_& m) {
  py::class_<Access>(m, "Access")
      .def_readonly("name", &Access::name)
      .def_readonly("writes", &Access::writes)
      .def_readonly("ranges", &Access::ranges);
  py::class_<Message>(m, "Message")
      .def_readonly("sends", &Message::sends)
      .def_readonly("group", &Message::group)
      .def_readonly("source", &Message::from)
      .def_readonly("target", &Message::to)
      .def_readonly("place", &Message::place)
      .def_readonly("access", &Message::access);
  py::class_<Entry>(m, "Entry")
      .def_readonly("kind", &Entry::kind)
      .def_readonly("name", &Entry::name)
      .def_readonly("thread", &Entry::thread)
      .def_readonly("stream", &Entry::stream)
      .def_readonly("number", &Entry::number)
      .def_readonly("streams", &Entry::streams)
      .def_readonly("accesses", &Entry::accesses)
      .def_readonly("messages", &Entry::messages);
  m.def("entries", [] { return log().entries(); });
  m.def("mark", [](std::string name) { log().add({.kind = "mark", .name = std::move(name)}); });
  m.def("plant_fault", plant_fault);
  m.def("clear_faults", clear_faults);
  m.def("pause_faults", pause_faults);
  m.def("occurrences", occurrences);
}

void bind_machine(py::module_& m) {
  m.attr("DEVICES") = kDevices;
  m.attr("EVERY") = kEvery;
  m.attr("NEVER") = kNever;
  py::class_<Stream>(m, "Stream")
      .def_readonly("number", &Stream::number)
      .def_readonly("device", &Stream::device)
      .def_readonly("id", &Stream::id)
      .def_readonly("name", &Stream::name);
  m.def("streams", [] { return machine().streams(); });
  m.def("pool_stream", [](int device) { return machine().pool_stream(device); });
  m.def("default_stream", [](int device) { return machine().stream(device, 0); });
  m.def("current_stream", [](int device) { return machine().current_stream(device); });
  m.def("set_current_stream",
        [](const Stream& stream) { machine().set_current_stream(machine().stream(stream.device, stream.id)); });
  m.def("current_device", &Machine::current_device);
  m.def("set_current_device", &Machine::set_current_device);
  m.def("wait_for", [](const Stream& waits, const Stream& other) { machine().block(waits, machine().record(other)); });
  m.def("synchronize", [] {
    std::vector<int> all;
    for (const Stream& stream : machine().streams()) all.push_back(stream.number);
    machine().host_wait("test", all);
  });
  m.def("reset", [] { machine().reset(); });
  m.def("usage", [](int device) {
    const Usage usage = machine().usage(device);
    return py::make_tuple(usage.now, usage.peak, usage.allocations);
  });
  m.def("reset_usage", [] { machine().reset_usage(); });
  m.def("set_capture", [](std::uint64_t graph) { machine().capture = graph; });
}

}  // namespace

PYBIND11_MODULE(_streams, m) {
  bind_log(m);
  bind_machine(m);
  m.def("make_group", make_group, py::arg("name"), py::arg("world"), py::arg("rank"), py::arg("size"),
        py::arg("backends"));
  m.def("abort_groups", abort_groups);
  m.def("destroy_groups", destroy_groups);
  m.def("kernel_table", [] { return reinterpret_cast<std::uintptr_t>(&kernels()); });
  m.def("set_runner", set_python_runner);
}
