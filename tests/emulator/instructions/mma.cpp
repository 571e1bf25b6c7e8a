// mma.sync: D = A B + C for one warp. A is 16 x K in rows, B is K x 8 in columns, C and D are 16 x 8.
//
// With g = lane / 4 and t = lane % 4, element i of a lane lies at
//   A, 16 bits:  row g + 8 (i/2 % 2),  column 2t + i%2 + 8 (i/4)        B: k = 2t + i%2 + 8 (i/2),  column g
//   A, tf32:     row g + 8 (i % 2),    column t + 4 (i/2)               B: k = t + 4i,              column g
//   A, 8 bits:   row g + 8 (i/4 % 2),  column 4t + i%4 + 16 (i/8)       B: k = 4t + i%4 + 16 (i/4), column g
//   C and D:     row g + 8 (i / 2),    column 2t + i%2
// Sums are in float in the order of k; the hardware's order is its own.
#include "mma.h"
#include "families.h"
#include "lanes.h"
#include "rounding.h"

#include <algorithm>

namespace emulator {

namespace {

enum Input { kF16, kBf16, kTf32Input, kS8, kU8, kE4m3Input, kE5m2Input };

int input_named(const std::string& word) {
  constexpr std::string_view names[] = {"f16", "bf16", "tf32", "s8", "u8", "e4m3", "e5m2"};
  for (int k = 0; k < 7; ++k)
    if (word == names[k]) return k;
  return -1;
}

float to_float(uint32_t bits, int input) {
  switch (input) {
    case kF16:
      return from_half(static_cast<uint16_t>(bits));
    case kBf16:
      return from_bfloat(static_cast<uint16_t>(bits));
    case kTf32Input:
      return std::bit_cast<float>(bits & 0xffffe000);  // what the hardware reads
    case kS8:
      return static_cast<int8_t>(bits);
    case kU8:
      return static_cast<uint8_t>(bits);
    case kE4m3Input:
      return static_cast<float>(decode_number(bits & 255, kE4m3));
    default:
      return static_cast<float>(decode_number(bits & 255, kE5m2));
  }
}

template <class T, class F>
void multiply(const float (&a)[16][32], const float (&b)[32][8], T (&c)[16][8], int k_size, F) {
  for (int m = 0; m < 16; ++m)
    for (int k = 0; k < k_size; ++k)
      for (int n = 0; n < 8; ++n) c[m][n] += static_cast<T>(a[m][k]) * static_cast<T>(b[k][n]);
}

// value: [0] k, [1] input of a | of b << 8, [2] kind of C and D: 0 f32, 1 f16, 2 s32, [3] sums of s32 saturate
void run(Warp& w, const Instruction& in) {
  if (w.mask != kAll) throw Fault("mma.sync: collective with missing lanes: all 32 must take part", ~w.mask);
  const int k_size = static_cast<int>(in.value[0]), a_input = static_cast<int>(in.value[1] & 255),
            b_input = static_cast<int>(in.value[1] >> 8);
  const int bytes = a_input <= kBf16 ? 2 : a_input == kTf32Input ? 4 : 1, per_word = 4 / bytes;
  float a[16][32], b[32][8];
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (size_t r = 0; r < in.list.size(); ++r) {
      const uint32_t word = w.in<uint32_t>(in.list[r])[lane];
      const int row = g + 8 * (r % 2), column = per_word * t + 4 * per_word * static_cast<int>(r / 2);
      for (int i = 0; i < per_word; ++i) a[row][column + i] = to_float(word >> 8 * bytes * i, a_input);
    }
    for (size_t r = 0; r < in.list_b.size(); ++r) {
      const uint32_t word = w.in<uint32_t>(in.list_b[r])[lane];
      for (int i = 0; i < per_word; ++i)
        b[per_word * t + 4 * per_word * r + i][g] = to_float(word >> 8 * bytes * i, b_input);
    }
  }
  const Operand *c = in.list_c.data(), *d = in.list_d.data();
  auto place = [](int lane, int i) { return std::pair(lane / 4 + 8 * (i / 2), 2 * (lane % 4) + i % 2); };
  if (in.value[2] == 2) {
    int64_t sum[16][8];
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) sum[place(lane, i).first][place(lane, i).second] = w.in<int32_t>(c[i])[lane];
    multiply(a, b, sum, k_size, 0);
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        int64_t value = sum[place(lane, i).first][place(lane, i).second];
        if (in.value[3]) value = std::clamp<int64_t>(value, INT32_MIN, INT32_MAX);
        w.out<int32_t>(d[i])[lane] = static_cast<int32_t>(value);
      }
  } else {
    float sum[16][8];
    const bool half = in.value[2] == 1;
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i)
        sum[place(lane, i).first][place(lane, i).second] =
            half ? from_half(static_cast<uint16_t>(w.in<uint32_t>(c[i / 2])[lane] >> 16 * (i % 2)))
                 : w.in<float>(c[i])[lane];
    multiply(a, b, sum, k_size, 0);
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        const float value = sum[place(lane, i).first][place(lane, i).second];
        if (!half)
          w.out<float>(d[i])[lane] = value;
        else
          w.out<uint16_t>(d[i / 2])[2 * lane + i % 2] = to_half(value);
      }
  }
  w.block->counters->matrix_flops += 2 * 16 * 8 * static_cast<uint64_t>(k_size);
}

// mma.sync.aligned.m16n8kK.row.col.dtype.atype.btype.ctype d, a, b, c
void mma(Decoder& s) {
  for (const char* word : {"sync", "aligned", "row", "col"}) s.need(word);
  const std::string shape = s.take_one({"m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16", "m16n8k32"});
  if (shape.empty()) s.unknown("unknown shape");
  const bool small = shape == "m8n8k4";
  s.in.value[0] = std::stoi(shape.substr(small ? 5 : 6));
  const bool satfinite = s.take("satfinite");
  std::vector<std::string> types;
  while (types.size() < 4) {
    const std::string word = s.take_first();
    if (word.empty()) s.unknown("four types expected");
    types.push_back(word);
  }
  if (types == std::vector<std::string>(4, "f64") && !satfinite && s.in.value[0] <= 16)
    return mma_double(s, small ? 8 : 16, static_cast<int>(s.in.value[0]));
  const int a = input_named(types[1]), b = input_named(types[2]);
  const bool integer = a == kS8 || a == kU8, eight = a >= kS8;
  if (a < 0 || b < 0 || types[0] != types[3] || small || (satfinite && !integer) ||
      (a != b && (!eight || b < kS8 || integer != (b == kS8 || b == kU8))))
    s.unknown("unknown types");
  s.in.value[3] = satfinite;
  if (types[0] == "f32" && !integer)
    s.in.value[2] = 0;
  else if (types[0] == "f16" && (a == kF16 || (eight && !integer)))
    s.in.value[2] = 1;
  else if (types[0] == "s32" && integer)
    s.in.value[2] = 2;
  else
    s.unknown("unknown types");
  s.in.value[1] = a | b << 8;
  const int bytes = a <= kBf16 ? 2 : a == kTf32Input ? 4 : 1;
  const size_t words = static_cast<size_t>(s.in.value[0] * bytes / 16);  // of B; A has twice as many
  const size_t results = s.in.value[2] == 1 ? 2 : 4;
  const Type real = s.in.value[2] == 0 ? Type::f32 : Type::b32;
  s.in.list_d = s.vector(0, real);
  s.in.list = s.vector(1, Type::b32);
  s.in.list_b = s.vector(2, Type::b32);
  s.in.list_c = s.vector(3, real);
  if (!words || words > 2 || s.in.list.size() != 2 * words || s.in.list_b.size() != words ||
      s.in.list_c.size() != results || s.in.list_d.size() != results)
    s.unknown("wrong number of registers");
  s.in.execute = run;
}

}  // namespace

void mma_instructions(Table& table) { table.add({"mma"}, "", Class::matrix, mma); }

}  // namespace emulator
