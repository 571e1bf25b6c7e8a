// The loop that executes a warp's instructions, and what it watches over.
#include "async_copy.h"
#include "machine.h"

#include <algorithm>

namespace emulator {

// Registers of wgmma: accumulators in flight may not be touched, its A registers not be written; what an ordinary
// instruction writes needs a wgmma.fence before a wgmma takes it. A mov stands for no instruction: compilers place
// copies and constants anywhere, and the assembler merges the registers. It passes on what it copies, poison too.
void Warp::check_registers(const Instruction& in) {
  if (in.is_warpgroup) return;
  auto state = [&](const Operand& o) -> uint8_t& {
    static thread_local uint8_t none;
    none = 0;
    const size_t at = static_cast<size_t>(o.offset) / 64;
    return o.present && o.base == Base::registers && at < register_state.size() ? register_state[at] : none;
  };
  uint8_t touched = in.is_copy ? 0 : kTouched;
  auto read = [&](const Operand& o) {
    const uint8_t s = state(o);
    if (in.is_copy)
      touched |= s & kTouched;
    else if (s & kAccumulating)
      throw Fault("wgmma: accumulator read before wgmma.wait_group");
  };
  auto write = [&](const Operand& o) {
    uint8_t& s = state(o);
    if (s & kAccumulating) throw Fault("wgmma: accumulator written before wgmma.wait_group");
    if (s & kFeeding) throw Fault("wgmma: A register written before wgmma.wait_group");
    s = static_cast<uint8_t>((s & ~kTouched) | touched);
  };
  for (const Operand* o : {&in.a, &in.b, &in.c, &in.e}) read(*o);
  for (const auto* list : {&in.list_b, &in.list_c})
    for (const Operand& o : *list) read(o);
  if (!in.list_is_written)
    for (const Operand& o : in.list) read(o);
  write(in.d);
  write(in.d2);
  if (in.list_is_written)
    for (const Operand& o : in.list) write(o);
}

// Lanes that loop may wait for what lanes that are parked at the end of the loop will do (a lock): those go ahead
// alone.
bool Warp::release_parked() {
  bool any = false;
  for (size_t i = 0, count = splits.size(); i < count; ++i)
    for (int join = splits[i].join; join >= 0; join = joins[join].parent) {
      Join& one = joins[join];
      if (!one.arrived || one.pc == kReturn) continue;
      splits.push_back({one.pc, one.arrived, one.parent, one.frame, 0});
      one.expected &= ~one.arrived;
      one.arrived = 0;
      loose = any = true;
    }
  return any;
}

bool Warp::idle() const {
  if (!polls || poll_stamp != block->events) return false;
  return splits.size() == 1 || std::all_of(splits.begin(), splits.end(), [&](const Split& split) {
           return split.collecting || split.poll_stamp == block->events;
         });
}

bool Warp::run(int budget) {
  budget_ = budget;
  uint64_t* executions = block->counters->executions.data();
  const uint64_t before = executed;
  while (budget_-- > 0 && wait == Wait::none) {
    const Instruction* in = &frame->function->code[pc];
    while (in->is_join && splits[current].join >= 0 && joins[splits[current].join].pc == pc) {
      store();
      arrive(active);
      if (wait != Wait::none) break;
      in = &frame->function->code[pc];
    }
    if (wait != Wait::none) break;
    mask = active;
    if (in->guard >= 0) {
      const uint32_t guard = *reinterpret_cast<const uint32_t*>(base[0] + in->guard);
      mask &= in->guard_negated ? ~guard : guard;
    }
    ++executed;
    ++executions[in->id];
    const int at = pc;
    next = pc + 1;
    if (matrix_frame == frame && mask) check_registers(*in);
    if (mask) in->execute(*this, *in);
    pc = next;
    if (next <= at && wait == Wait::none && block->watch) look_for_loop();
    // Fairness among splits: one that spins must not keep the others from what it spins for.
    if (active != alive && wait == Wait::none && next <= at && ++turns_ % 64 == 0) {
      if (turns_ % 4096 == 0) release_parked();
      store();
      pick();
    }
  }
  if (wait != Wait::done) store();
  if (splits.size() > 1 && splits[current].poll_stamp == block->events) pick();  // others go before it polls again
  return executed != before;
}

}  // namespace emulator
