// PTX text to ModuleSyntax: the module level (variables, functions) here, function bodies in body_parser.cpp.
#include "parser.h"

#include <cstring>
#include <sstream>

namespace emulator {

namespace {

Space space_named(const std::string& word) {
  if (word == ".global") return Space::global;
  if (word == ".shared") return Space::shared;
  if (word == ".local") return Space::local;
  if (word == ".const") return Space::constant;
  if (word == ".param") return Space::param;
  return Space::generic;
}

}  // namespace

// .space [.align n] .type name [sizes] [= initial]; the space was read.
Variable Parser::variable(Space space) {
  Variable found;
  found.space = space;
  int vector = 1;
  while (lexer.peek() == '.') {
    const std::string word = lexer.directive();
    if (word == ".align") {
      found.align = lexer.number().value;
    } else if (word == ".ptr") {  // a hint about a pointer parameter
      while (lexer.peek() == '.')
        if (lexer.directive() == ".align") lexer.number();
    } else if (word == ".v2" || word == ".v4") {
      vector = word[2] - '0';
    } else if (word == ".attribute") {
      while (!lexer.take(')')) lexer.take('(') || (lexer.dotted(), true);
    } else if ((found.type = type_named(std::string_view(word).substr(1))) == Type::none) {
      lexer.fail("unknown type " + word);
    }
  }
  found.name = lexer.name();
  const int element = bytes_of(found.type) * vector;
  found.align = std::max<int64_t>(found.align, element);
  int64_t count = 1;
  while (lexer.take('[')) {
    count *= lexer.peek() == ']' ? 0 : lexer.number().value;
    lexer.expect(']');
  }
  found.bytes = count * element;
  if (lexer.take('=')) initialiser(found, bytes_of(found.type));
  return found;
}

void Parser::initialiser(Variable& variable, int element) {
  if (lexer.take('{')) {
    while (!lexer.take('}')) {
      initialiser(variable, element);
      lexer.take(',');
    }
    return;
  }
  int64_t value = 0;
  if (lexer.at_number()) {
    value = lexer.number().value;
  } else {  // the address of a variable, or generic(variable), perhaps with an offset
    std::string name = lexer.name();
    if (name == "generic") {
      lexer.expect('(');
      name = lexer.name();
      lexer.expect(')');
    }
    if (lexer.take('+')) value = lexer.number().value;
    variable.pointers.emplace_back(variable.initial.size(), name);
  }
  const size_t at = variable.initial.size();
  variable.initial.resize(at + element);
  std::memcpy(variable.initial.data() + at, &value, std::min(element, 8));
}

std::vector<Variable> Parser::formals(FunctionSyntax& function) {
  std::vector<Variable> found;
  lexer.expect('(');
  while (!lexer.take(')')) {
    const std::string space = lexer.directive();
    if (space != ".param" && space != ".reg") lexer.fail("parameters are .param");
    Variable one = variable(Space::param);
    function.param_bytes = align_up(function.param_bytes, one.align);
    one.offset = function.param_bytes;
    function.param_bytes += one.bytes;
    function.scopes[0].variables[one.name] = one;
    found.push_back(one);
    lexer.take(',');
  }
  return found;
}

void Parser::function(bool is_entry) {
  FunctionSyntax found;
  found.is_entry = is_entry;
  found.scopes.emplace_back();
  if (lexer.peek() == '(') found.results = formals(found);
  found.name = lexer.name();
  if (lexer.peek() == '(') found.params = formals(found);
  while (lexer.peek() == '.') {
    const std::string word = lexer.directive();
    const bool threads = word == ".maxntid" || word == ".reqntid";
    int product = 1;
    while (lexer.at_number()) {
      product *= static_cast<int>(lexer.number().value);
      if (!lexer.take(',')) break;
    }
    if (threads) found.max_threads = product;
    if (word == ".maxnreg") found.max_registers = product;
    if (word == ".minnctapersm") found.min_blocks = product;
    if (word == ".reqnctapercluster" && product > 1) lexer.fail("clusters of more than one block are not modelled");
    if (word == ".pragma") {
      lexer.quoted();
      lexer.take(';');
    }
  }
  if (!lexer.take(';')) {
    found.has_body = true;
    lexer.expect('{');
    body(found);
  }
  for (FunctionSyntax& known : module.functions) {
    if (known.name != found.name) continue;
    if (found.has_body) known = std::move(found);
    return;
  }
  module.functions.push_back(std::move(found));
}

void Parser::place_shared(int64_t& used, Variable& variable) {
  if (variable.bytes == 0) return;  // extern: behind the static ones, at launch
  used = align_up(used, variable.align);
  variable.offset = used;
  used += variable.bytes;
}

// A kernel's own variables lie behind those of the module and of its other functions.
void Parser::place_kernel_shared(FunctionSyntax& function) {
  int64_t align = 1;
  for (const Scope& scope : function.scopes)
    for (const auto& [name, one] : scope.variables)
      if (one.space == Space::shared) align = std::max(align, one.align);
  const int64_t first = align_up(module.shared_bytes, align);
  for (Scope& scope : function.scopes)
    for (auto& [name, one] : scope.variables)
      if (one.space == Space::shared && one.bytes) one.offset += first;
  function.shared_bytes += function.shared_bytes ? first : module.shared_bytes;
}

void Parser::top_level() {
  const std::string word = lexer.directive();
  if (word == ".version") {
    lexer.number();
  } else if (word == ".target") {
    module.target = lexer.name();
    while (lexer.take(',')) lexer.name();
  } else if (word == ".address_size") {
    if (lexer.number().value != 64) lexer.fail("64-bit addresses expected");
  } else if (word == ".file") {
    const int number = static_cast<int>(lexer.number().value);
    module.files[number] = lexer.quoted();
    while (lexer.take(',')) lexer.number();
  } else if (word == ".section") {
    lexer.dotted();
    lexer.expect('{');
    while (!lexer.take('}')) lexer.peek() == '"' ? (void)lexer.quoted() : lexer.skip_character();
  } else if (word == ".extern" || word == ".visible" || word == ".weak" || word == ".common") {
    // linkage: one module is a whole program
  } else if (word == ".entry" || word == ".func") {
    while (lexer.peek() == '.') {  // .noreturn, .attribute
      lexer.directive();
    }
    function(word == ".entry");
  } else if (word == ".pragma") {
    lexer.quoted();
    lexer.expect(';');
  } else if (const Space space = space_named(word); space != Space::generic) {
    do {
      Variable found = variable(space);
      if (space == Space::shared) place_shared(module.shared_bytes, found);
      module.variables.push_back(std::move(found));
    } while (lexer.take(','));
    lexer.expect(';');
  } else {
    lexer.fail("unknown directive " + word);
  }
}

ModuleSyntax parse(const std::string& text) {
  Parser parser(text);
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) parser.module.lines.push_back(line);
  while (!parser.lexer.at_end()) parser.top_level();
  for (FunctionSyntax& function : parser.module.functions)
    if (function.is_entry) parser.place_kernel_shared(function);
  return std::move(parser.module);
}

}  // namespace emulator
