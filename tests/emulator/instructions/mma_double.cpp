// mma.sync in double: D = A B + C for one warp. A is 8 or 16 x K, B is K x 8, C and D are 8 or 16 x 8.
//
// With g = lane / 4 and t = lane % 4, element i of a lane lies at
//   A:        row g + 8 (i % 2),  column t + 4 (i / 2); with 8 rows the only one is (g, t)
//   B:        k = t + 4 i,        column g
//   C and D:  row g + 8 (i / 2),  column 2t + i%2
// Every step of k is one fused operation.
#include "families.h"
#include "lanes.h"
#include "mma.h"

#include <cmath>

namespace emulator {

namespace {

// value: [0] k, [1] rows
void run(Warp& w, const Instruction& in) {
  if (w.mask != kAll) throw Fault("mma.sync: collective with missing lanes: all 32 must take part", ~w.mask);
  const int k_size = static_cast<int>(in.value[0]), rows = static_cast<int>(in.value[1]);
  double a[16][16], b[16][8], c[16][8];
  const int halves = rows / 8;
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < static_cast<int>(in.list.size()); ++i)
      a[g + 8 * (i % halves)][t + 4 * (i / halves)] = w.in<double>(in.list[i])[lane];
    for (int i = 0; i < static_cast<int>(in.list_b.size()); ++i) b[t + 4 * i][g] = w.in<double>(in.list_b[i])[lane];
    for (int i = 0; i < static_cast<int>(in.list_c.size()); ++i)
      c[g + 8 * (i / 2)][2 * t + i % 2] = w.in<double>(in.list_c[i])[lane];
  }
  for (int m = 0; m < rows; ++m)
    for (int k = 0; k < k_size; ++k)
      for (int n = 0; n < 8; ++n) c[m][n] = std::fma(a[m][k], b[k][n], c[m][n]);
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < static_cast<int>(in.list_d.size()); ++i)
      w.out<double>(in.list_d[i])[lane] = c[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
  w.block->counters->matrix_flops += 2 * 8 * static_cast<uint64_t>(rows * k_size);
}

}  // namespace

void mma_double(Decoder& s, int rows, int k_size) {
  s.in.value[0] = k_size;
  s.in.value[1] = rows;
  s.in.list_d = s.vector(0, Type::f64);
  s.in.list = s.vector(1, Type::f64);
  s.in.list_b = s.vector(2, Type::f64);
  s.in.list_c = s.vector(3, Type::f64);
  const size_t results = static_cast<size_t>(rows / 4), words = static_cast<size_t>(k_size / 4);
  if (s.in.list_d.size() != results || s.in.list_c.size() != results || s.in.list_b.size() != words ||
      s.in.list.size() != words * rows / 8)
    s.unknown("wrong number of registers");
  s.in.execute = run;
}

}  // namespace emulator
