// What an instruction family may ask of a statement: see decoder.h.
#include <algorithm>

#include "function_decoder.h"
#include "specials.h"

namespace emulator {

bool Decoder::has(std::string_view suffix) const {
  return std::find(suffixes_.begin(), suffixes_.end(), suffix) != suffixes_.end();
}
bool Decoder::take(std::string_view suffix) {
  auto found = std::find(suffixes_.begin(), suffixes_.end(), suffix);
  if (found == suffixes_.end()) return false;
  suffixes_.erase(found);
  return true;
}
std::string Decoder::take_one(std::initializer_list<std::string_view> suffixes) {
  for (std::string_view suffix : suffixes)
    if (take(suffix)) return std::string(suffix);
  return "";
}
std::string Decoder::take_first() {
  if (suffixes_.empty()) return "";
  const std::string found = suffixes_.front();
  suffixes_.erase(suffixes_.begin());
  return found;
}
bool Decoder::take_starting(std::string_view beginning) {
  for (const std::string& suffix : suffixes_)
    if (suffix.compare(0, beginning.size(), beginning) == 0) return take(std::string(suffix));
  return false;
}
void Decoder::need(std::string_view suffix) {
  if (!take(suffix)) unknown("." + std::string(suffix) + " expected");
}
Type Decoder::next_type() const {
  for (const std::string& suffix : suffixes_)
    if (const Type found = type_named(suffix); found != Type::none) return found;
  return Type::none;
}
Type Decoder::type() {
  for (const std::string& suffix : suffixes_) {
    const Type found = type_named(suffix);
    if (found == Type::none) continue;
    take(std::string(suffix));
    return found;
  }
  unknown("a type expected");
}
const Expression& Decoder::expression(int i) {
  if (i >= count()) unknown("operand missing");
  used_ |= 1u << i;
  return statement_.operands[i];
}
int64_t Decoder::immediate(int i) {
  const Expression& found = expression(i);
  if (found.kind != Expression::Kind::integer) unknown("an immediate expected");
  return found.value;
}
Operand Decoder::resolve(int i, Type type, bool writes) {
  const Expression& found = expression(i);
  Operand operand = resolve_any(found, type);
  if (writes && operand.present && operand.base != Base::registers) unknown("a register expected");
  if (operand.present && type != Type::none && operand.bytes != bytes_of(type))
    unknown("register of another width than ." + std::string(facts(type).name) + ": " + found.name);
  return operand;
}
Operand Decoder::item(const Expression& expression, Type type) { return resolve_any(expression, type); }

Operand Decoder::resolve_any(const Expression& found, Type type) {
  using Kind = Expression::Kind;
  const int bytes = type == Type::none ? 8 : bytes_of(type);
  switch (found.kind) {
    case Kind::sink:
      return {};
    case Kind::integer: {
      if (type == Type::pred) return owner_.truth(found.value != 0);
      int64_t value[2] = {found.value, 0};
      if (facts(type).family == 'f') {  // an integer literal where a real stands
        const double real = static_cast<double>(found.value);
        const float narrow = static_cast<float>(real);
        type == Type::f64 ? std::memcpy(value, &real, 8) : std::memcpy(value, &narrow, 4);
      }
      return owner_.constant(value, bytes);
    }
    case Kind::real32:
      return owner_.constant(&found.value, 4);
    case Kind::real64: {
      if (bytes == 8) return owner_.constant(&found.value, 8);
      double wide;
      std::memcpy(&wide, &found.value, 8);
      const float narrow = static_cast<float>(wide);
      return owner_.constant(&narrow, 4);
    }
    case Kind::name:
      break;
    default:
      unknown("a register or a constant expected");
  }
  if (const Operand* known = owner_.find_register(statement_.scope, found.name)) {
    Operand operand = *known;
    operand.negated = found.negated;
    return operand;
  }
  if (found.name == "WARP_SZ") {
    const int64_t lanes = 32;
    return owner_.constant(&lanes, bytes);
  }
  if (const Special* special = special_named(found.name)) {
    Operand operand;
    operand.present = true;
    operand.base = Base::specials;
    operand.bytes = static_cast<uint8_t>(special->bytes);
    operand.offset = special->offset;
    return operand;
  }
  if (const Variable* variable = owner_.find_variable(statement_.scope, found.name)) {
    const int64_t offset = variable->offset + found.value;
    if (variable->space == Space::shared) return owner_.shared_address(offset, variable->bytes == 0, bytes);
    if (variable->space == Space::param) return owner_.constant(&offset, bytes);
    if (variable->space == Space::local) {
      Operand operand = owner_.constant(&offset, bytes);
      operand.in_frame = true;
      return operand;
    }
    for (const auto& global : owner_.program.variables) {
      if (global->variable.name != found.name) continue;
      const uint64_t address = global->address + found.value;
      return owner_.constant(&address, bytes);
    }
  }
  for (size_t i = 0; i < owner_.program.functions.size(); ++i) {
    if (owner_.program.functions[i]->name != found.name) continue;
    const uint64_t address = Program::address_of(i);
    return owner_.constant(&address, bytes);
  }
  unknown("unknown name " + found.name);
}

std::pair<Operand, Operand> Decoder::out_pair(int i, Type first, Type second) {
  const Expression& found = expression(i);
  if (found.kind != Expression::Kind::pair) return {out(i, first), Operand{}};
  return {resolve_any(found.items[0], first), resolve_any(found.items[1], second)};
}
std::vector<Operand> Decoder::vector(int i, Type type, bool loose) {
  const Expression& found = expression(i);
  std::vector<Operand> operands;
  const bool single = found.kind != Expression::Kind::vector;
  for (size_t k = 0; k < (single ? 1 : found.items.size()); ++k) {
    operands.push_back(resolve_any(single ? found : found.items[k], type));
    if (!loose && operands.back().present && operands.back().bytes != bytes_of(type)) unknown("vector element width");
  }
  return operands;
}
Operand Decoder::address(int i) {
  const Expression& found = expression(i);
  if (found.kind != Expression::Kind::memory) unknown("an address expected");
  Expression base;
  base.kind = found.name.empty() ? Expression::Kind::integer : Expression::Kind::name;
  base.name = found.name;
  base.value = found.name.empty() ? found.value : 0;
  Operand operand = resolve_any(base, Type::b64);
  if (!found.name.empty()) operand.addend = found.value;
  return operand;
}
int Decoder::label(int i) {
  const Expression& found = expression(i);
  for (int scope = statement_.scope; scope >= 0; scope = owner_.syntax.scopes[scope].parent) {
    auto known = owner_.syntax.scopes[scope].labels.find(found.name);
    if (known != owner_.syntax.scopes[scope].labels.end()) return known->second;
  }
  unknown("unknown label " + found.name);
}
std::vector<int> Decoder::branch_targets(int i) {
  const Expression& found = expression(i);
  std::vector<int> targets;
  for (int scope = statement_.scope; scope >= 0; scope = owner_.syntax.scopes[scope].parent) {
    const Scope& names = owner_.syntax.scopes[scope];
    auto known = names.tables.find(found.name);
    if (known == names.tables.end()) continue;
    for (const std::string& label : known->second) targets.push_back(names.labels.at(label));
    return targets;
  }
  unknown("unknown .branchtargets " + found.name);
}
const Function* Decoder::function(int i) {
  const Expression& found = expression(i);
  for (const auto& function : owner_.program.functions)
    if (function->name == found.name) return function.get();
  unknown("call of " + found.name + ", which this module does not define");
}
const Prototype* Decoder::prototype(int i) {
  const Expression& found = statement_.operands[i];
  for (int scope = statement_.scope; scope >= 0; scope = owner_.syntax.scopes[scope].parent) {
    const auto& known = owner_.syntax.scopes[scope].prototypes;
    auto one = known.find(found.name);
    if (one == known.end()) continue;
    expression(i);
    return &one->second;
  }
  return nullptr;
}
const Variable* Decoder::variable(const std::string& name) { return owner_.find_variable(statement_.scope, name); }
int Decoder::arch() const { return owner_.program.arch; }
void Decoder::unknown(const std::string& what) const { throw Fault(what); }
void Decoder::finish() {
  if (!suffixes_.empty()) unknown("unknown modifier ." + suffixes_[0]);
  if (used_ != (1u << count()) - 1) unknown("unknown operand form");
}

}  // namespace emulator
