// Control flow: bra brx ret exit trap brkpt nanosleep, and hints that do nothing.
#include "families.h"
#include "lanes.h"

namespace emulator {

namespace {

void run_branch(Warp& w, const Instruction& in) { w.jump(w.mask, in); }

void branch(Decoder& s) {
  s.take("uni");
  s.in.target = s.label(0);
  s.in.execute = run_branch;
}

void run_table(Warp& w, const Instruction& in) {
  // One target at a time: the lanes of the others stay and come here again.
  const uint32_t* index = w.in<uint32_t>(in.a);
  const uint32_t first = index[__builtin_ctz(w.mask)];
  if (first >= in.targets.size()) throw Fault("branch index " + std::to_string(first) + " out of bounds");
  uint32_t same = 0;
  for (int lane = 0; lane < 32; ++lane)
    if (w.mask >> lane & 1 && index[lane] == first) same |= 1u << lane;
  Instruction one;
  one.target = in.targets[first];
  one.join = in.join;
  if (same != w.active) w.next = w.pc;
  w.jump(same, one);
}

void branch_table(Decoder& s) {
  s.need("idx");
  s.take("uni");
  s.in.a = s.source(0, Type::u32);
  s.in.targets = s.branch_targets(1);
  s.in.execute = run_table;
}

void run_return(Warp& w, const Instruction&) { w.return_lanes(); }
void run_exit(Warp& w, const Instruction&) { w.exit_lanes(w.mask); }

void leave(Decoder& s) {
  s.take("uni");
  s.in.execute = s.opcode() == "ret" ? run_return : run_exit;
}

void nothing(Decoder& s) {
  s.take("mask");
  if (s.count()) s.immediate(0);  // which performance counter
  s.in.execute = [](Warp&, const Instruction&) {};
}

}  // namespace

bool is_branch(const Instruction& in) { return in.execute == run_branch || in.execute == run_table; }
bool is_exit(const Instruction& in) { return in.execute == run_return || in.execute == run_exit; }

void control_instructions(Table& table) {
  table.add({"bra"}, "", Class::control, branch);
  table.add({"brx"}, "", Class::control, branch_table);
  table.add({"ret", "exit"}, "", Class::control, leave);
  table.add({"trap"}, "", Class::control,
            [](Decoder& s) { s.in.execute = [](Warp&, const Instruction&) { throw Fault("trap"); }; });
  table.add({"brkpt", "pmevent"}, "", Class::control, nothing);
  table.add({"nanosleep"}, "", Class::control, [](Decoder& s) {
    s.need("u32");
    s.source(0, Type::u32);
    s.in.execute = [](Warp& w, const Instruction&) { w.yield(); };
  });
}

}  // namespace emulator
