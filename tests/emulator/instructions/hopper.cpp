// setmaxnreg, griddepcontrol and other small instructions of sm_90.
#include "families.h"
#include "lanes.h"

namespace emulator {

namespace {

// Registers move between the warps and the pool of the block; an increase waits until the pool can serve it.
void run_registers(Warp& w, const Instruction& in) {
  Block& block = *w.block;
  const int wanted = static_cast<int>(in.value[0]), have = w.registers_per_thread;
  if (w.mask != kAll) throw Fault("setmaxnreg: collective with missing lanes", ~w.mask);
  if (in.value[1] ? wanted < have : wanted > have)
    throw Fault(std::string("setmaxnreg.") + (in.value[1] ? "inc" : "dec") + " to " + std::to_string(wanted) +
                " from " + std::to_string(have));
  const int change = 32 * (wanted - have);
  if (change > block.register_pool) {
    w.registers_wanted = wanted;
    w.polls = w.poll_stamp == block.events ? w.polls + 1 : 1;
    w.poll_stamp = block.events;
    w.next = w.pc;
    w.yield();
    return;
  }
  w.polls = w.registers_wanted = 0;
  block.register_pool -= change;
  w.registers_per_thread = wanted;
  if (change < 0) block.happened();
}

}  // namespace

void hopper_instructions(Table& table) {
  table.add({"setmaxnreg"}, "", Class::control, [](Decoder& s) {
    s.in.value[1] = s.take("inc");
    if (!s.in.value[1]) s.need("dec");
    for (const char* word : {"sync", "aligned", "u32"}) s.need(word);
    s.in.value[0] = s.immediate(0);
    if (s.in.value[0] < 24 || s.in.value[0] > 256 || s.in.value[0] % 8) s.unknown("24 to 256 in steps of 8");
    s.in.execute = run_registers;
  });
  // One grid at a time: what it depends on is done.
  table.add({"griddepcontrol"}, "", Class::control, [](Decoder& s) {
    if (!s.take("wait")) s.need("launch_dependents");
    s.in.execute = [](Warp&, const Instruction&) {};
  });
}

}  // namespace emulator
