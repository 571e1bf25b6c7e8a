// What the parser makes of PTX text: statements with their operands as written, names not yet resolved.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "types.h"

namespace emulator {

// The text of every error, without the place; the place is added where it is known.
struct Fault : std::runtime_error {
  explicit Fault(const std::string& text, uint32_t lanes = 0) : std::runtime_error(text), lanes(lanes) {}
  uint32_t lanes;  // 0: all that were active
};

struct Expression {
  enum class Kind { name, integer, real32, real64, vector, memory, pair, sink } kind = Kind::sink;
  std::string name;               // name, and memory whose base is a name
  int64_t value = 0;              // an integer, the bits of a real, or the offset after a name
  bool negated = false;           // !p
  std::vector<Expression> items;  // vector: elements; pair: p|q; memory: further parts as in [map, {x, y}]
};

struct Place {
  int file = 0;  // of .file; 0: unknown
  int line = 0;
  int site = -1;  // where the function of this line was inlined: index into ModuleSyntax::sites; -1: nowhere
};

struct CallSite {  // a place itself, in a function that may have been inlined too
  Place place;
  int column = 0;
};

struct Statement {
  std::string opcode;                 // "add"
  std::vector<std::string> suffixes;  // "sat", "s32"
  std::vector<Expression> operands;
  std::string guard;  // predicate register or empty
  bool guard_negated = false;
  int scope = 0;
  int line = 0;  // of the PTX text
  Place place;
};

enum class Space : uint8_t { generic, global, shared, local, constant, param, reg };

struct Variable {
  std::string name;
  Space space = Space::generic;
  Type type = Type::none;
  int64_t bytes = 0;  // 0: extern, sized at launch
  int64_t align = 1;
  std::vector<uint8_t> initial;
  std::vector<std::pair<int64_t, std::string>>
      pointers;        // byte offset, name of the variable whose address stands there
  int64_t offset = 0;  // in its space, set by the parser for param, local, shared
};

struct Prototype {  // of an indirect call
  std::vector<Variable> results, params;
  int64_t bytes = 0;  // of all parameters
};

struct Scope {
  int parent = -1;
  std::map<std::string, Type> registers;
  std::map<std::string, Variable> variables;               // param, local, shared
  std::map<std::string, int> labels;                       // index of the statement that follows
  std::map<std::string, std::vector<std::string>> tables;  // .branchtargets
  std::map<std::string, Prototype> prototypes;             // .callprototype
};

struct FunctionSyntax {
  std::string name;
  bool is_entry = false;
  bool has_body = false;
  std::vector<Variable> results, params;
  std::vector<Scope> scopes;
  std::vector<Statement> statements;
  int64_t param_bytes = 0, local_bytes = 0;
  int64_t shared_bytes = 0;               // of a kernel: all that it has statically
  int max_threads = 0;                    // of .maxntid or .reqntid; 0: not given
  int max_registers = 0, min_blocks = 0;  // of .maxnreg and .minnctapersm; 0: not given
};

struct ModuleSyntax {
  std::string target;  // "sm_90a"
  std::vector<std::string> lines;
  std::map<int, std::string> files;
  std::vector<CallSite> sites;
  std::vector<Variable> variables;  // global, const, shared
  std::vector<FunctionSyntax> functions;
  int64_t shared_bytes = 0;  // static ones outside kernels
};

ModuleSyntax parse(const std::string& text);

inline int64_t align_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

}  // namespace emulator
