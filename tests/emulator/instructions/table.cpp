// The instruction table: every family once.
#include "families.h"

namespace emulator {

const Table& instruction_table() {
  static const Table table = [] {
    Table made;
    integer_instructions(made);
    bit_instructions(made);
    bit_field_instructions(made);
    float_instructions(made);
    half_instructions(made);
    compare_instructions(made);
    convert_instructions(made);
    move_instructions(made);
    memory_instructions(made);
    atomic_instructions(made);
    control_instructions(made);
    call_instructions(made);
    collective_instructions(made);
    barrier_instructions(made);
    cp_async_instructions(made);
    matrix_load_instructions(made);
    mma_instructions(made);
    mbarrier_instructions(made);
    wgmma_instructions(made);
    hopper_instructions(made);
    return made;
  }();
  return table;
}

}  // namespace emulator
