// One function per instruction family; each puts its instructions into the table.
#pragma once

#include "../machine/decoder.h"

namespace emulator {

void integer_instructions(Table& table);
void bit_instructions(Table& table);
void bit_field_instructions(Table& table);
void float_instructions(Table& table);
void half_instructions(Table& table);
void compare_instructions(Table& table);
void convert_instructions(Table& table);
void move_instructions(Table& table);
void memory_instructions(Table& table);
void atomic_instructions(Table& table);
void control_instructions(Table& table);
void call_instructions(Table& table);
void collective_instructions(Table& table);
void barrier_instructions(Table& table);
void cp_async_instructions(Table& table);
void matrix_load_instructions(Table& table);
void mma_instructions(Table& table);
void mbarrier_instructions(Table& table);
void wgmma_instructions(Table& table);
void hopper_instructions(Table& table);

}  // namespace emulator
