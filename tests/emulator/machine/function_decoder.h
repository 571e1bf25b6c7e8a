// Names, registers and constants of one function while it is decoded.
#pragma once

#include <cstring>

#include "decoder.h"
#include "specials.h"

namespace emulator {

class FunctionDecoder {
 public:
  FunctionDecoder(Program& program, const ModuleSyntax& module, const FunctionSyntax& syntax, Function& function)
      : program(program), module(module), syntax(syntax), function(function) {
    place_registers();
  }

  void run() {
    function.code.resize(syntax.statements.size());
    for (size_t i = 0; i < syntax.statements.size(); ++i) {
      try {
        one(syntax.statements[i], function.code[i]);
      } catch (const Fault& fault) {
        const int line = syntax.statements[i].line;
        throw Fault("PTX line " + std::to_string(line) + ": " + fault.what() + ": " + module.lines[line - 1]);
      }
    }
    // Execution never runs off the end: nvcc ends functions with ret, but not those that end in trap.
    if (function.code.empty() || !is_exit(function.code.back())) {
      Statement end;
      end.opcode = "ret";
      function.code.emplace_back();
      one(end, function.code.back());
    }
    find_joins(function);
  }

  // Scoped lookups walk outwards.
  const Operand* find_register(int scope, const std::string& name) const {
    for (; scope >= 0; scope = syntax.scopes[scope].parent) {
      auto found = registers[scope].find(name);
      if (found != registers[scope].end()) return &found->second;
    }
    return nullptr;
  }
  const Variable* find_variable(int scope, const std::string& name) const {
    for (; scope >= 0; scope = syntax.scopes[scope].parent) {
      auto found = syntax.scopes[scope].variables.find(name);
      if (found != syntax.scopes[scope].variables.end()) return &found->second;
    }
    for (const Variable& variable : module.variables)
      if (variable.name == name) return &variable;
    return nullptr;
  }

  Operand constant(const void* value, int bytes) {
    Operand found;
    found.present = true;
    found.base = Base::constants;
    found.bytes = static_cast<uint8_t>(bytes);
    const std::string key(static_cast<const char*>(value), bytes);
    auto known = constants_.find(key);
    if (known != constants_.end()) {
      found.offset = known->second;
      return found;
    }
    found.offset = static_cast<int32_t>(function.constants.size());
    for (int lane = 0; lane < 32; ++lane) function.constants.insert(function.constants.end(), key.begin(), key.end());
    function.constants.resize(align_up(function.constants.size(), 64));
    constants_[key] = found.offset;
    return found;
  }
  Operand truth(bool value) {
    Operand found;
    found.present = true;
    found.base = Base::constants;
    found.offset = static_cast<int32_t>(function.constants.size());
    function.constants.resize(function.constants.size() + 64, value ? 0xff : 0);
    return found;
  }
  Operand shared_address(int64_t addend, bool dynamic, int bytes) {
    Operand found;
    found.present = true;
    found.base = Base::constants;
    found.bytes = static_cast<uint8_t>(bytes);
    found.offset = static_cast<int32_t>(function.constants.size());
    function.constants.resize(function.constants.size() + align_up(32 * bytes, 64));
    function.relocations.push_back({found.offset, bytes, addend, dynamic});
    return found;
  }

  Program& program;
  const ModuleSyntax& module;
  const FunctionSyntax& syntax;
  Function& function;
  std::vector<std::map<std::string, Operand>> registers;

 private:
  void place_registers() {
    int64_t used = 0;
    for (const Scope& scope : syntax.scopes) {
      registers.emplace_back();
      for (const auto& [name, type] : scope.registers) {
        Operand place;
        place.present = true;
        place.bytes = static_cast<uint8_t>(bytes_of(type));
        place.offset = static_cast<int32_t>(used);
        registers.back()[name] = place;
        used += place.bytes ? align_up(32 * place.bytes, 64) : 4;
        if (place.bytes == 0) used = align_up(used, 64);
      }
    }
    function.register_bytes = used + 64;
  }

  void one(const Statement& statement, Instruction& in) {
    in.id = program.instructions++;
    in.line = statement.line;
    in.place = statement.place;
    if (!statement.guard.empty()) {
      const Operand* guard = find_register(statement.scope, statement.guard);
      if (!guard || guard->bytes) throw Fault("unknown predicate " + statement.guard);
      in.guard = guard->offset;
      in.guard_negated = statement.guard_negated;
    }
    const Table::Entry* entry = instruction_table().find(statement);
    if (!entry) throw Fault("unknown instruction");
    in.kind = entry->kind;
    program.names.push_back({form_of(statement), Table::row(statement.opcode, *entry)});
    Decoder decoder(*this, statement, in);
    entry->decode(decoder);
    decoder.finish();
  }

  static std::string form_of(const Statement& statement) {
    std::string form = statement.opcode;
    for (const std::string& suffix : statement.suffixes) form += "." + suffix;
    for (const Expression& operand : statement.operands)
      if (special_named(operand.name) || operand.name == "vprintf") form += " " + operand.name;
    return form;
  }

  std::unordered_map<std::string, int32_t> constants_;
};

}  // namespace emulator
