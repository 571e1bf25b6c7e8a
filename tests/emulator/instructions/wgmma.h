// One wgmma of one warp, from its issue to its wait.
#pragma once

#include <vector>

#include "../machine/machine.h"

namespace emulator {

// What an instruction needs when it is carried out. Its Instruction::value: [0] N, [1] input: 0 f16, 1 bf16, 2 tf32,
// [2] bits: 1 A in registers, 2 A transposed, 4 B transposed, 8 -A, 16 -B; [3] elements of K
struct Matrix {
  Block* block;
  Warp* warp;
  uint8_t* registers;
  const Instruction* in;
  uint64_t a, b;
  bool accumulate;
};

void read_operands(const Matrix& m, float (&a)[16][16], std::vector<float>& b);
void hold_operands(const Matrix& m, std::vector<std::pair<uint32_t, int>>& held);  // the shared memory that it reads
void carry_out(const Matrix& m);

}  // namespace emulator
