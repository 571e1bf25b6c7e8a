// ModuleSyntax to Program: names become offsets, immediates become constants, statements become instructions.
#include <algorithm>
#include <cstring>

#include "function_decoder.h"
#include "memory.h"

namespace emulator {

const Table::Entry* Table::find(const Statement& statement) const {
  char family = '-';
  for (const std::string& suffix : statement.suffixes)
    if (const Type type = type_named(suffix); type != Type::none) family = facts(type).family;
  auto found = entries_.find(statement.opcode);
  if (found == entries_.end()) return nullptr;
  for (const Entry& entry : found->second)
    if (entry.families.empty() || entry.families.find(family) != std::string::npos) return &entry;
  return nullptr;
}

std::vector<std::string> Table::rows() const {
  std::vector<std::string> found;
  for (const auto& [opcode, entries] : entries_)
    for (const Entry& entry : entries) found.push_back(row(opcode, entry));
  return found;
}

namespace {

// Initialisers that hold addresses of variables or functions.
void fill_pointers(Program& program) {
  for (auto& global : program.variables)
    for (const auto& [offset, name] : global->variable.pointers) {
      uint64_t address;
      std::memcpy(&address, global->bytes.data() + offset, 8);
      for (const auto& other : program.variables)
        if (other->variable.name == name) address += other->address;
      for (size_t i = 0; i < program.functions.size(); ++i)
        if (program.functions[i]->name == name) address += Program::address_of(i);
      std::memcpy(global->bytes.data() + offset, &address, 8);
    }
}

}  // namespace

std::unique_ptr<Program> decode(ModuleSyntax syntax) {
  auto program = std::make_unique<Program>();
  program->target = syntax.target;
  program->arch = std::atoi(syntax.target.c_str() + 3);
  for (const Variable& variable : syntax.variables) {
    if (variable.space == Space::shared) continue;
    auto global = std::make_unique<GlobalVariable>();
    global->variable = variable;
    global->bytes.assign(variable.initial.begin(), variable.initial.end());
    global->bytes.resize(std::max<size_t>(variable.bytes, variable.initial.size()));
    global->address = Memory::window_address(static_cast<int>(program->variables.size()) + 1);
    program->variables.push_back(std::move(global));
  }
  std::vector<const FunctionSyntax*> bodies;
  for (const FunctionSyntax& function : syntax.functions) {
    if (!function.has_body) continue;
    auto decoded = std::make_unique<Function>();
    decoded->name = function.name;
    decoded->is_entry = function.is_entry;
    decoded->param_bytes = function.param_bytes;
    decoded->local_bytes = align_up(function.local_bytes, 16);
    decoded->shared_bytes = function.shared_bytes;
    decoded->results = function.results;
    decoded->params = function.params;
    decoded->max_threads = function.max_threads;
    decoded->max_registers = function.max_registers;
    decoded->min_blocks = function.min_blocks;
    program->functions.push_back(std::move(decoded));
    bodies.push_back(&function);
  }
  fill_pointers(*program);
  for (size_t i = 0; i < bodies.size(); ++i)
    FunctionDecoder(*program, syntax, *bodies[i], *program->functions[i]).run();
  program->lines = std::move(syntax.lines);
  program->files = std::move(syntax.files);
  program->sites = std::move(syntax.sites);
  return program;
}

}  // namespace emulator
