// Decoded programs: every instruction is a function pointer with resolved operands. Decoded once, run many times.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "../ptx/syntax.h"

namespace emulator {

struct Warp;
struct Instruction;
using Execute = void (*)(Warp&, const Instruction&);

// Where an operand's 32 lanes lie. Immediates are spread over 32 lanes when decoded, so that all operands look alike.
enum class Base : uint8_t { registers, constants, specials };
constexpr int kBases = 3;

struct Operand {
  bool present = false;
  Base base = Base::registers;
  uint8_t bytes = 0;      // of one lane; 0: a predicate, whose lanes are the bits of one word
  bool negated = false;   // !p
  bool in_frame = false;  // an address in the local memory of the current call
  int32_t offset = 0;     // bytes behind the base
  int64_t addend = 0;     // of an address
};

enum class Class : uint8_t {
  integer,
  floating,
  half,
  conversion,
  move,
  memory,
  atomic,
  collective,
  barrier,
  matrix,
  async,
  control,
};
constexpr const char* kClassNames[] = {"integer", "float",      "half",    "conversion", "move",  "memory",
                                       "atomic",  "collective", "barrier", "matrix",     "async", "control"};
constexpr int kClasses = 12;

struct Function;

struct Instruction {
  Execute execute = nullptr;
  int guard = -1;  // offset of the predicate
  bool guard_negated = false;
  bool is_join = false;  // some branch's lanes come together here
  Class kind = Class::control;
  Space space = Space::generic;
  bool list_is_written = false;                       // list holds results
  bool is_copy = false;                               // mov
  bool is_warpgroup = false;                          // wgmma
  Operand d, d2, a, b, c, e;                          // the manual's names: d = op(a, b, c)
  std::vector<Operand> list, list_b, list_c, list_d;  // vectors
  int64_t value[4] = {};                              // what the decoder of a family wants to remember
  int target = -1;                                    // of a branch
  std::vector<int> targets;                           // of brx
  int join = -1;                                      // where its lanes come together; -1: nowhere before they end
  const Function* callee = nullptr;
  std::vector<std::pair<int64_t, int64_t>> argument_offsets,
      result_offsets;  // param space of the caller, of the callee
  std::vector<int64_t> argument_bytes, result_bytes;
  int id = 0;    // counts over the program
  int line = 0;  // of the PTX text
  Place place;
};

struct Relocation {  // a constant that holds an address in shared memory, known at launch
  int32_t offset;
  int bytes;
  int64_t addend;
  bool dynamic;
};

struct Function {
  std::string name;
  bool is_entry = false;
  int64_t register_bytes = 64, param_bytes = 0, local_bytes = 0, shared_bytes = 0;
  int max_threads = 0, max_registers = 0, min_blocks = 0;  // .maxntid, .maxnreg, .minnctapersm; 0: not given
  std::vector<Variable> results, params;
  std::vector<Instruction> code;
  std::vector<uint8_t> constants;
  std::vector<Relocation> relocations;

  // Per thread, as the assembler chooses them for kernels with setmaxnreg: all that the block can have.
  int registers_at_entry(int threads) const {
    if (max_registers) return static_cast<int>(align_up(max_registers, 8));
    if (max_threads) threads = static_cast<int>(align_up(max_threads, 32));
    return std::min(248, 64 * 1024 / (threads * std::max(1, min_blocks)) / 8 * 8);
  }
};

struct InstructionName {
  std::string form;  // "add.rn.f32", and the special registers it reads: "mov.u32 %clock"
  std::string row;   // of the instruction table: "add f"
};

struct GlobalVariable {
  Variable variable;
  std::vector<uint8_t> bytes;
  uint64_t address = 0;
};

struct Program {
  std::string target;
  int arch = 80;
  std::vector<std::string> lines;
  std::map<int, std::string> files;
  std::vector<CallSite> sites;
  std::vector<std::unique_ptr<GlobalVariable>> variables;
  std::vector<std::unique_ptr<Function>> functions;
  int instructions = 0;
  std::vector<InstructionName> names;  // by Instruction::id

  // Addresses of functions: a space of their own, 16 bytes apart.
  static uint64_t address_of(size_t function) { return (uint64_t{4} << 56) + 16 * (function + 1); }
  const Function* at(uint64_t address) const {
    for (size_t i = 0; i < functions.size(); ++i)
      if (address_of(i) == address) return functions[i].get();
    return nullptr;
  }
  const Function* find(const std::string& name) const {
    for (const auto& function : functions)
      if (function->name == name) return function.get();
    return nullptr;
  }
};

std::unique_ptr<Program> decode(ModuleSyntax syntax);

// control_flow.cpp: sets Instruction::join and is_join of the branches of one function.
void find_joins(Function& function);
bool is_branch(const Instruction& instruction);
bool is_indirect_call(const Instruction& instruction);
bool is_exit(const Instruction& instruction);  // leaves the function: ret, exit, trap

}  // namespace emulator
