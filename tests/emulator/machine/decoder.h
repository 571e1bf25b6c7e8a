// What an instruction family sees of the statement that it decodes. Suffixes and operands that nobody asked for are
// errors.
#pragma once

#include <functional>
#include <initializer_list>

#include "program.h"

namespace emulator {

class FunctionDecoder;  // decode.cpp: names and constants of one function

class Decoder {
 public:
  Decoder(FunctionDecoder& owner, const Statement& statement, Instruction& in)
      : in(in), owner_(owner), statement_(statement), suffixes_(statement.suffixes) {}

  // Suffixes: each can be taken once.
  bool take(std::string_view suffix);
  std::string take_one(std::initializer_list<std::string_view> suffixes);  // empty: none of them
  std::string take_first();                                                // whatever comes next
  bool has(std::string_view suffix) const;
  bool take_starting(std::string_view beginning);
  Type type();             // the next suffix that names a type; an error if there is none
  Type next_type() const;  // without taking it; none if there is none
  void need(std::string_view suffix);

  // Operands by position. width -1: any register, narrower and wider ones as ld, st and cvt allow.
  int count() const { return static_cast<int>(statement_.operands.size()); }
  Operand out(int i, Type type) { return resolve(i, type, true); }
  Operand source(int i, Type type) { return resolve(i, type, false); }
  Operand any_out(int i) { return resolve(i, Type::none, true); }
  Operand any_source(int i, Type type) { return resolve_any(expression(i), type); }
  std::pair<Operand, Operand> out_pair(int i, Type first, Type second);  // d|p; each may be _
  std::vector<Operand> vector(int i, Type type, bool loose = false);     // {a, b, ...}, or a single one
  Operand address(int i);                                                // [name + offset]
  const std::vector<Expression>& address_items(int i) { return expression(i).items; }
  Operand item(const Expression& expression, Type type);  // of a vector or of an address
  bool is_sink(int i) { return expression(i).kind == Expression::Kind::sink; }
  bool is_vector(int i) { return expression(i).kind == Expression::Kind::vector; }
  bool is_memory(int i) { return expression(i).kind == Expression::Kind::memory; }
  bool is_immediate(int i) { return expression(i).kind == Expression::Kind::integer; }
  int64_t immediate(int i);
  const Expression& expression(int i);
  int label(int i);
  std::vector<int> branch_targets(int i);
  const Function* function(int i);
  const Prototype* prototype(int i);  // null: the operand does not name one
  const Variable* variable(const std::string& name);

  const std::string& opcode() const { return statement_.opcode; }
  int arch() const;
  void finish();  // nothing may be left
  [[noreturn]] void unknown(const std::string& what) const;

  Instruction& in;

 private:
  Operand resolve(int i, Type type, bool writes);
  Operand resolve_any(const Expression& expression, Type type);

  FunctionDecoder& owner_;
  const Statement& statement_;
  std::vector<std::string> suffixes_;
  uint32_t used_ = 0;  // operands that were asked for
};

// The instruction table: opcode and, where families share an opcode (add), the families of its last type.
class Table {
 public:
  using Decode = std::function<void(Decoder&)>;
  struct Entry {
    std::string families;
    Class kind;
    Decode decode;
  };
  void add(std::initializer_list<const char*> opcodes, const std::string& families, Class kind, Decode decode) {
    for (const char* opcode : opcodes) entries_[opcode].push_back({families, kind, decode});
  }
  const Entry* find(const Statement& statement) const;
  static std::string row(const std::string& opcode, const Entry& entry) { return opcode + " " + entry.families; }
  std::vector<std::string> rows() const;

 private:
  std::unordered_map<std::string, std::vector<Entry>> entries_;
};

const Table& instruction_table();

}  // namespace emulator
