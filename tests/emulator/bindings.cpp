// The Python face: a module made from PTX, and launches of its kernels. What arguments mean is decided in __init__.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <tuple>

#include "machine/decoder.h"
#include "machine/machine.h"

namespace py = pybind11;
using namespace emulator;

namespace {

struct Module {
  explicit Module(const std::string& ptx) : program(decode(parse(ptx))) {}
  std::unique_ptr<Program> program;

  const Function& kernel(const std::string& name) const {
    const Function* found = program->find(name);
    if (!found) {  // a mangled name that holds this one
      for (const auto& function : program->functions) {
        if (!function->is_entry || function->name.find(name) == std::string::npos) continue;
        if (found) throw Fault("more than one kernel is called " + name);
        found = function.get();
      }
    }
    if (!found || !found->is_entry) throw Fault("no kernel is called " + name);
    return *found;
  }
};

template <class T>
T named(const std::string& word, std::initializer_list<std::pair<const char*, T>> names) {
  for (const auto& [name, value] : names)
    if (word == name) return value;
  throw Fault("unknown word " + word);
}

py::dict counters_of(const Program& program, const Counters& counters) {
  py::dict found, classes, conflicts, lines, forms;
  uint64_t by_class[kClasses] = {}, total = 0;
  std::map<std::string_view, uint64_t> by_form;
  for (const auto& function : program.functions)
    for (const Instruction& in : function->code) {
      const uint64_t count = counters.executions[in.id];
      by_class[static_cast<int>(in.kind)] += count;
      total += count;
      if (count) lines[py::int_(in.line)] = count;
      if (count) by_form[program.names[in.id].form] += count;
      if (counters.shared_ideal[in.id])
        conflicts[py::int_(in.line)] =
            py::make_tuple(counters.shared_transactions[in.id], counters.shared_ideal[in.id]);
    }
  for (int k = 0; k < kClasses; ++k) classes[kClassNames[k]] = by_class[k];
  for (const auto& [form, count] : by_form) forms[py::str(form.data(), form.size())] = count;
  found["total"] = total;
  found["forms"] = forms;
  found["instructions"] = classes;
  found["lines"] = lines;
  found["shared"] = conflicts;
  found["matrix_flops"] = counters.matrix_flops;
  found["barriers"] = counters.barriers;
  found["global_read"] =
      py::make_tuple(counters.global_read_bytes, counters.global_read_sectors, counters.global_read_ideal);
  found["global_write"] =
      py::make_tuple(counters.global_write_bytes, counters.global_write_sectors, counters.global_write_ideal);
  found["printed"] = counters.printed;
  found["copied_bytes"] = counters.copied_bytes;
  return found;
}

using Region =
    std::tuple<uint64_t, uintptr_t, int64_t, std::string, bool>;  // address, host pointer, bytes, name, read only

py::dict launch(Module& module, const std::string& kernel, std::array<uint32_t, 3> grid, std::array<uint32_t, 3> block,
                int64_t shared_bytes, const std::string& params, const std::vector<Region>& regions, uint64_t seed,
                const std::string& copies, const std::string& schedule, bool check_races, int threads, uint64_t limit) {
  Launch one;
  one.program = module.program.get();
  one.kernel = &module.kernel(kernel);
  std::copy(grid.begin(), grid.end(), one.grid);
  std::copy(block.begin(), block.end(), one.block);
  one.dynamic_shared = shared_bytes;
  one.params.assign(params.begin(), params.end());
  one.seed = seed;
  one.copies = named<Copies>(copies, {{"early", Copies::early}, {"late", Copies::late}, {"random", Copies::random}});
  one.schedule = named<Schedule>(
      schedule,
      {{"in order", Schedule::in_order}, {"random", Schedule::random}, {"adversarial", Schedule::adversarial}});
  one.check_races = check_races;
  one.threads = threads;
  one.limit = limit;
  for (const auto& global : module.program->variables)
    one.memory.add(global->address, global->bytes.data(), static_cast<int64_t>(global->bytes.size()),
                   global->variable.name, global->variable.space == Space::constant);
  for (const auto& [address, pointer, bytes, name, read_only] : regions)
    one.memory.add(address, reinterpret_cast<void*>(pointer), bytes, name, read_only);
  {
    py::gil_scoped_release without_lock;
    one.run();
  }
  return counters_of(*module.program, one.counters);
}

}  // namespace

PYBIND11_MODULE(_emulator, m) {
  static py::exception<std::runtime_error> error(m, "EmulatorError", PyExc_RuntimeError);
  py::register_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const std::runtime_error& one) {
      PyErr_SetString(error.ptr(), one.what());
    }
  });
  m.def("instruction_rows", [] { return instruction_table().rows(); });  // "add us", "add f", ...
  py::class_<Module>(m, "Module")
      .def(py::init<const std::string&>())
      .def("launch", launch)
      .def("kernels",
           [](const Module& module) {
             std::vector<std::string> names;
             for (const auto& function : module.program->functions)
               if (function->is_entry) names.push_back(function->name);
             return names;
           })
      .def("parameters",  // (type, bytes, offset) of each
           [](const Module& module, const std::string& kernel) {
             std::vector<std::tuple<std::string, int64_t, int64_t>> found;
             for (const Variable& one : module.kernel(kernel).params)
               found.emplace_back(std::string(facts(one.type).name), one.bytes, one.offset);
             return found;
           })
      .def("name", [](const Module& module, const std::string& kernel) { return module.kernel(kernel).name; })
      .def("rows",  // of the instruction table, by form
           [](const Module& module) {
             std::map<std::string, std::string> found;
             for (const InstructionName& one : module.program->names) found[one.form] = one.row;
             return found;
           })
      .def("variables",  // (name, address, bytes) of each
           [](const Module& module) {
             std::vector<std::tuple<std::string, uint64_t, size_t>> found;
             for (const auto& global : module.program->variables)
               found.emplace_back(global->variable.name, global->address, global->bytes.size());
             return found;
           })
      .def("variable",
           [](Module& module, const std::string& name) -> py::object {  // a writable view of a __device__ variable
             for (const auto& global : module.program->variables)
               if (global->variable.name == name)
                 return py::memoryview::from_memory(global->bytes.data(),
                                                    static_cast<py::ssize_t>(global->bytes.size()));
             throw Fault("no variable is called " + name);
           });
}
