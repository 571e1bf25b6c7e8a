// The parser's state, shared by its two files.
#pragma once

#include <array>

#include "lexer.h"

namespace emulator {

struct Parser {
  explicit Parser(const std::string& text) : lexer(text) {}

  void top_level();
  void function(bool is_entry);
  std::vector<Variable> formals(FunctionSyntax& function);
  Variable variable(Space space);
  void initialiser(Variable& variable, int element);
  static void place_shared(int64_t& used, Variable& variable);
  void place_kernel_shared(FunctionSyntax& function);

  void body(FunctionSyntax& function);
  void body_directive(FunctionSyntax& function, int scope);
  void instruction(FunctionSyntax& function, int scope, const std::string& guard, bool negated);
  Expression operand();
  Expression memory();

  Lexer lexer;
  ModuleSyntax module;
  int call_site(CallSite site);

  Place place;                                // of the last .loc
  std::map<std::array<int, 3>, int> inlined;  // file, line, column of such a .loc: its call site
  std::string last_label;
};

}  // namespace emulator
