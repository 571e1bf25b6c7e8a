// Function bodies: declarations, labels, brace scopes, .loc, and instructions with their operands.
#include "parser.h"

namespace emulator {

void Parser::body(FunctionSyntax& function) {
  std::vector<int> open = {0};
  place = {};
  inlined.clear();
  while (!open.empty()) {
    const int scope = open.back();
    if (lexer.take('{')) {
      function.scopes.emplace_back();
      function.scopes.back().parent = scope;
      open.push_back(static_cast<int>(function.scopes.size()) - 1);
    } else if (lexer.take('}')) {
      open.pop_back();
    } else if (lexer.take(';')) {
      // an empty statement, as inline assembly leaves them
    } else if (lexer.peek() == '.') {
      body_directive(function, scope);
    } else if (lexer.take('@')) {
      const bool negated = lexer.take('!');
      const std::string guard = lexer.name();
      instruction(function, scope, guard, negated);
    } else if (lexer.at_label()) {
      const std::string label = lexer.name();
      lexer.expect(':');
      last_label = label;
      function.scopes[scope].labels[label] = static_cast<int>(function.statements.size());
    } else {
      instruction(function, scope, "", false);
    }
  }
}

// A call site that was itself inlined had a .loc of its own before, which says where.
int Parser::call_site(CallSite site) {
  auto outer = inlined.find({site.place.file, site.place.line, site.column});
  if (outer != inlined.end()) site.place.site = outer->second;
  module.sites.push_back(site);
  return static_cast<int>(module.sites.size()) - 1;
}

void Parser::body_directive(FunctionSyntax& function, int scope) {
  const std::string word = lexer.directive();
  if (word == ".loc") {
    place.file = static_cast<int>(lexer.number().value);
    place.line = static_cast<int>(lexer.number().value);
    place.site = -1;
    const int column = static_cast<int>(lexer.number().value);
    while (lexer.take(',')) {  // function_name label, inlined_at file line column
      lexer.name();
      if (lexer.at_number()) {
        CallSite site;
        site.place.file = static_cast<int>(lexer.number().value);
        site.place.line = static_cast<int>(lexer.number().value);
        site.column = static_cast<int>(lexer.number().value);
        place.site = call_site(site);
      } else {
        lexer.name();
        if (lexer.take('+')) lexer.number();
      }
    }
    if (place.site >= 0) inlined[{place.file, place.line, column}] = place.site;
    return;
  }
  if (word == ".pragma") {
    lexer.quoted();
    lexer.expect(';');
    return;
  }
  if (word == ".branchtargets") {  // the table that the label before it names
    do {
      function.scopes[scope].tables[last_label].push_back(lexer.name());
    } while (lexer.take(','));
  } else if (word == ".callprototype") {  // (results) _ (parameters), which the label before it names
    FunctionSyntax layout;
    layout.scopes.emplace_back();
    Prototype found;
    if (lexer.peek() == '(') found.results = formals(layout);
    lexer.name();
    if (lexer.peek() == '(') found.params = formals(layout);
    while (lexer.peek() == '.') lexer.directive();
    found.bytes = layout.param_bytes;
    function.scopes[scope].prototypes[last_label] = std::move(found);
  } else if (word == ".reg") {
    Type type = Type::none;
    while (lexer.peek() == '.') type = type_named(std::string_view(lexer.directive()).substr(1));
    if (type == Type::none) lexer.fail("unknown register type");
    do {
      const std::string name = lexer.name();
      if (lexer.take('<')) {
        const int64_t count = lexer.number().value;
        lexer.expect('>');
        for (int64_t i = 0; i < count; ++i) function.scopes[scope].registers[name + std::to_string(i)] = type;
      } else {
        function.scopes[scope].registers[name] = type;
      }
    } while (lexer.take(','));
  } else if (word == ".local" || word == ".shared" || word == ".param") {
    const Space space = word == ".local" ? Space::local : word == ".shared" ? Space::shared : Space::param;
    do {
      Variable found = variable(space);
      if (space == Space::shared) {
        place_shared(function.is_entry ? function.shared_bytes : module.shared_bytes, found);
      } else {
        int64_t& used = space == Space::local ? function.local_bytes : function.param_bytes;
        used = align_up(used, found.align);
        found.offset = used;
        used += found.bytes;
      }
      function.scopes[scope].variables[found.name] = found;
    } while (lexer.take(','));
  } else {
    lexer.fail("unknown directive " + word);
  }
  lexer.expect(';');
}

Expression Parser::memory() {  // behind the [
  Expression found;
  found.kind = Expression::Kind::memory;
  if (lexer.at_number()) {
    found.value = lexer.number().value;
  } else {
    found.name = lexer.name();
    if (lexer.take('+')) {
      found.value = lexer.number().value;
    } else if (lexer.peek() == '-') {
      found.value = lexer.number().value;
    }
  }
  while (lexer.take(',')) found.items.push_back(operand());
  lexer.expect(']');
  return found;
}

Expression Parser::operand() {
  Expression found;
  if (lexer.take('[')) return memory();
  if (lexer.take('{') || lexer.take('(')) {
    found.kind = Expression::Kind::vector;
    while (!lexer.take('}') && !lexer.take(')')) {
      found.items.push_back(operand());
      lexer.take(',');
    }
    return found;
  }
  if (lexer.at_number()) return lexer.number();
  found.negated = lexer.take('!');
  const bool minus = lexer.take('-');
  if (minus) lexer.fail("a negated name is not an operand");
  found.name = lexer.name();
  found.kind = found.name == "_" ? Expression::Kind::sink : Expression::Kind::name;
  if (lexer.take('+')) {
    found.value = lexer.number().value;
  } else if (found.kind == Expression::Kind::name && lexer.peek() == '-') {
    found.value = lexer.number().value;
  }
  if (lexer.take('|')) {
    Expression pair;
    pair.kind = Expression::Kind::pair;
    pair.items = {found, operand()};
    return pair;
  }
  return found;
}

void Parser::instruction(FunctionSyntax& function, int scope, const std::string& guard, bool negated) {
  Statement found;
  found.line = lexer.line();
  found.guard = guard;
  found.guard_negated = negated;
  found.scope = scope;
  found.place = place;
  const std::string word = lexer.dotted();
  for (size_t begin = 0; begin <= word.size();) {
    const size_t end = std::min(word.find('.', begin), word.size());
    const std::string part = word.substr(begin, end - begin);
    if (begin == 0)
      found.opcode = part;
    else
      found.suffixes.push_back(part);
    begin = end + 1;
  }
  while (!lexer.take(';')) {
    found.operands.push_back(operand());
    if (!lexer.take(',') && lexer.peek() != ';') lexer.fail("',' or ';' expected");
  }
  function.statements.push_back(std::move(found));
}

}  // namespace emulator
