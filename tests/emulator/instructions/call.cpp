// call: of functions by name and by address, and of the few functions that CUDA's run time brings.
#include "families.h"
#include "lanes.h"
#include "system_calls.h"

namespace emulator {

namespace {

// Lanes that call different functions go one after the other: each group comes here again alone, and they meet behind.
void run_indirect(Warp& w, const Instruction& in) {
  const int first = __builtin_ctz(w.mask);
  const uint64_t address = w.lane_value(in.a, first);
  uint32_t same = 0;
  for (int lane = first; lane < 32; ++lane)
    if (w.mask >> lane & 1 && w.lane_value(in.a, lane) == address) same |= 1u << lane;
  if (same != w.mask) {
    Instruction again;
    again.target = w.pc;
    again.join = in.join;
    w.next = w.pc;
    return w.jump(same, again);
  }
  const Function* callee = w.block->launch->program->at(address);
  if (!callee) throw Fault("call of " + hex(address) + ", where no function is");
  if (callee->param_bytes != in.value[0])
    throw Fault("call of " + callee->name + ", whose parameters are not those of the prototype");
  w.call(in, *callee);
}

// Pairs the .param variables of an operand with the parameters of the callee.
template <class Offsets, class Bytes>
void couple(Decoder& s, int operand, const std::vector<Variable>& formals, Offsets& offsets, Bytes& bytes) {
  const auto& items = s.expression(operand).items;
  if (items.size() != formals.size()) s.unknown("wrong number of call parameters");
  for (size_t i = 0; i < items.size(); ++i) {
    const Variable* actual = s.variable(items[i].name);
    if (!actual || actual->space != Space::param) s.unknown("a .param variable expected");
    offsets.emplace_back(actual->offset, formals[i].offset);
    bytes.push_back(formals[i].bytes);
  }
}

void call(Decoder& s) {
  s.take("uni");
  const bool has_results = s.is_vector(0);
  const int at = has_results ? 1 : 0, last = s.count() - 1;
  const bool has_arguments = last > at && s.is_vector(at + 1);
  if (system_call(s, at)) return;
  const std::vector<Variable>*results, *params;
  if (const Prototype* prototype = last > at ? s.prototype(last) : nullptr) {
    s.in.a = s.source(at, Type::b64);
    s.in.value[0] = prototype->bytes;
    s.in.execute = run_indirect;
    results = &prototype->results;
    params = &prototype->params;
  } else {
    s.in.callee = s.function(at);
    s.in.execute = [](Warp& w, const Instruction& in) { w.call(in, *in.callee); };
    results = &s.in.callee->results;
    params = &s.in.callee->params;
  }
  if (has_results) couple(s, 0, *results, s.in.result_offsets, s.in.result_bytes);
  if (has_arguments) couple(s, at + 1, *params, s.in.argument_offsets, s.in.argument_bytes);
}

}  // namespace

bool is_indirect_call(const Instruction& in) { return in.execute == run_indirect; }

void call_instructions(Table& table) { table.add({"call"}, "", Class::control, call); }

}  // namespace emulator
