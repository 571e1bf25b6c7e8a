// wgmma: D (64 x N) += A (64 x K) B (K x N) by a warpgroup; warp w of it has rows 16w to 16w + 15, as for mma.sync.
//
// A is in shared memory or in registers, B in shared memory, given by descriptors. Operands are read at issue (early),
// at the wait (late), or either (random); accumulators belong to the instruction until the wait.
#include "access.h"
#include "families.h"
#include "rounding.h"
#include "tensor_map.h"

#include "../machine/async_copy.h"

namespace emulator {

namespace {

// A descriptor, and the address of element (mn, k) of 16 bits that it describes. In units of 16 bytes = 8 elements:
//   K-major, no swizzle:  (mn%8) + SBO (mn/8) + LBO (k/8)                 rows of 16 bytes
//   K-major, swizzled:    rows of the swizzle's width, SBO (mn/8), k along the row
//   MN-major, no swizzle: (k%8) + LBO (k/8) + SBO (mn/8)
//   MN-major, swizzled:   rows (k%8) of the swizzle's width along mn, SBO (k/8), LBO from one width to the next
struct Descriptor {
  uint32_t start, lead, stride;
  int swizzle;  // mode as in tensor maps: 0 none, 1, 2, 3: 32, 64, 128 bytes

  explicit Descriptor(uint64_t bits)
      : start((bits & 0x3fff) << 4), lead((bits >> 16 & 0x3fff) << 4), stride((bits >> 32 & 0x3fff) << 4) {
    constexpr int modes[] = {0, 3, 2, 1};
    swizzle = modes[bits >> 62];
    if (bits >> 49 & 7) throw Fault("wgmma: descriptors with a base offset are not modelled");
  }
  uint32_t address(int mn, int k, bool mn_major) const {
    uint32_t at;
    if (!swizzle) {
      at = mn_major ? (mn % 8) * 2 + (k % 8) * 16 + (k / 8) * lead + (mn / 8) * stride
                    : (k % 8) * 2 + (mn % 8) * 16 + (mn / 8) * stride + (k / 8) * lead;
    } else {
      const uint32_t width = 16u << swizzle, elements = width / 2;
      at = mn_major ? (mn % elements) * 2 + (mn / elements) * lead + (k % 8) * width + (k / 8) * stride
                    : k * 2 + (mn % 8) * width + (mn / 8) * stride;
    }
    return swizzle_address(start + at, swizzle);
  }
};

struct Matrix {  // what an instruction needs when it is carried out
  Block* block;
  Warp* warp;
  uint8_t* registers;
  const Instruction* in;
  uint64_t a, b;
  bool accumulate;
};

// value: [0] N, [1] input, [2] bits: 1 A in registers, 2 A transposed, 4 B transposed, 8 -A, 16 -B; [3] elements of K
float read_element(const Matrix& m, const Descriptor& d, int mn, int k, bool mn_major, int bytes, int input) {
  if (bytes == 2) {
    uint16_t bits;
    const uint8_t* at = m.block->shared.async_read(m.warp->index, d.address(mn, k, mn_major), 2);
    std::memcpy(&bits, at, 2);
    return input == 0 ? from_half(bits) : from_bfloat(bits);
  }
  // 32-bit elements are K-major only: two 16-bit columns each
  uint32_t bits;
  std::memcpy(&bits, m.block->shared.async_read(m.warp->index, d.address(mn, 2 * k, false), 4), 4);
  return std::bit_cast<float>(bits & 0xffffe000);
}

void read_operands(const Matrix& m, float (&a)[16][16], std::vector<float>& b) {
  const Instruction& in = *m.in;
  const int n_size = static_cast<int>(in.value[0]), k_size = static_cast<int>(in.value[3]),
            input = static_cast<int>(in.value[1]);
  const int bytes = input == 2 ? 4 : 2, row = 16 * (m.warp->index % 4);
  if (in.value[2] & 1) {
    for (int lane = 0; lane < 32; ++lane)
      for (int r = 0; r < 4; ++r) {
        uint32_t word;
        std::memcpy(&word, m.registers + in.list_b[r].offset + 4 * lane, 4);
        const int i = lane / 4 + 8 * (r % 2);
        if (bytes == 4) {
          a[i][lane % 4 + 4 * (r / 2)] = std::bit_cast<float>(word & 0xffffe000);
        } else {
          for (int part = 0; part < 2; ++part) {
            const auto bits = static_cast<uint16_t>(word >> 16 * part);
            a[i][2 * (lane % 4) + part + 8 * (r / 2)] = input == 0 ? from_half(bits) : from_bfloat(bits);
          }
        }
      }
  } else {
    const Descriptor d(m.a);
    for (int i = 0; i < 16; ++i)
      for (int k = 0; k < k_size; ++k) a[i][k] = read_element(m, d, row + i, k, in.value[2] & 2, bytes, input);
  }
  const Descriptor d(m.b);
  b.resize(k_size * n_size);
  for (int k = 0; k < k_size; ++k)
    for (int n = 0; n < n_size; ++n) b[k * n_size + n] = read_element(m, d, n, k, in.value[2] & 4, bytes, input);
}

// The shared memory that an instruction reads, as runs of bytes.
void hold_operands(const Matrix& m, std::vector<std::pair<uint32_t, int>>& held) {
  const Instruction& in = *m.in;
  const int bytes = in.value[1] == 2 ? 4 : 2;
  auto add = [&](uint64_t bits, int first, int count, bool mn_major) {
    const Descriptor d(bits);
    for (int mn = first; mn < first + count; ++mn)
      for (int k = 0; k < in.value[3]; ++k) {
        const uint32_t at = d.address(mn, k * bytes / 2, mn_major);
        m.block->shared.hold(at, bytes, 1);
        if (!held.empty() && held.back().first + held.back().second == at)
          held.back().second += bytes;
        else
          held.emplace_back(at, bytes);
      }
  };
  if (!(in.value[2] & 1)) add(m.a, 16 * (m.warp->index % 4), 16, in.value[2] & 2);
  add(m.b, 0, static_cast<int>(in.value[0]), in.value[2] & 4);
}

void carry_out(const Matrix& m) {
  const Instruction& in = *m.in;
  const int n_size = static_cast<int>(in.value[0]), k_size = static_cast<int>(in.value[3]);
  float a[16][16];
  std::vector<float> b;
  read_operands(m, a, b);
  const float sign = ((in.value[2] & 8) != 0) != ((in.value[2] & 16) != 0) ? -1.0f : 1.0f;
  std::vector<float> sum(16 * n_size);
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < k_size; ++k)
      for (int n = 0; n < n_size; ++n) sum[i * n_size + n] += a[i][k] * b[k * n_size + n];
  for (size_t r = 0; r < in.list.size(); ++r) {
    auto* d = reinterpret_cast<float*>(m.registers + in.list[r].offset);
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4 + 8 * (r / 2 % 2), column = 8 * static_cast<int>(r / 4) + 2 * (lane % 4) + r % 2;
      const float value = sign * sum[row * n_size + column];
      d[lane] = m.accumulate ? d[lane] + value : value;
    }
  }
}

void need_warpgroup(Warp& w) {
  if (w.mask != kAll) throw Fault("wgmma: collective with missing lanes: all 128 must take part", ~w.mask);
  if (w.block->warps.size() < static_cast<size_t>(w.index / 4 * 4 + 4)) throw Fault("wgmma: no whole warpgroup");
}

void run(Warp& w, const Instruction& in) {
  need_warpgroup(w);
  AsyncState& state = *w.async;
  Matrix m{w.block, &w, w.frame->registers, &in, 0, w.uniform(in.b), true};
  if (!(in.value[2] & 1)) m.a = w.uniform(in.a);
  const uint32_t scale = w.predicate(in.c);
  if (scale != 0 && scale != kAll) throw Fault("wgmma: lanes differ in scale-d");
  m.accumulate = scale != 0;
  if (!state.matrix_fenced) throw Fault("wgmma: its registers were touched and no wgmma.fence followed");
  // The four warps must issue the same.
  const uint64_t what = in.id * 0x9e3779b97f4a7c15ULL ^ m.a * 31 ^ m.b * 17 ^ m.accumulate;
  auto& log = w.block->matrix_log[w.index / 4];
  if (w.matrix_count < log.size() && log[w.matrix_count] != what)
    throw Fault("wgmma: the warps of the warpgroup issue different instructions");
  if (w.matrix_count >= log.size()) log.push_back(what);
  ++w.matrix_count;
  // Registers in flight.
  w.matrix_frame = w.frame;
  w.register_state.resize(w.frame->function->register_bytes / 64 + 1);
  for (const Operand& o : in.list) {
    uint8_t& s = w.register_state[o.offset / 64];
    s |= kAccumulating | kMatrixRegister;
    state.matrix_open.accumulators.push_back(o.offset);
  }
  if (in.value[2] & 1)
    for (const Operand& o : in.list_b) {
      uint8_t& s = w.register_state[o.offset / 64];
      if (s & kAccumulating) throw Fault("wgmma: accumulator read before wgmma.wait_group");
      s |= kFeeding | kMatrixRegister;
      state.matrix_open.inputs.push_back(o.offset);
    }
  w.block->counters->matrix_flops += 2 * 16 * static_cast<uint64_t>(in.value[0] * in.value[3]);
  float a[16][16];
  std::vector<float> b;
  read_operands(m, a, b);  // they must be there now, whenever their values are taken
  hold_operands(m, state.matrix_open.held);
  const Copies when = w.block->launch->copies;
  const bool now = when == Copies::early || (when == Copies::random && w.block->random() % 2);
  const bool waiting =
      !state.matrix_open.work.empty() || std::any_of(state.matrix_groups.begin(), state.matrix_groups.end(),
                                                     [](const MatrixGroup& group) { return !group.work.empty(); });
  if (now && !waiting) return carry_out(m);  // in order: not before an earlier one
  state.matrix_open.work.push_back([m] { carry_out(m); });
}

void run_commit(Warp& w, const Instruction&) {
  need_warpgroup(w);
  w.async->matrix_groups.push_back(std::move(w.async->matrix_open));
  w.async->matrix_open = {};
  ++w.block->events;
}

// Does what is left of a warp's groups before the target-th and lets go of the shared memory that they read.
void finish_groups(Warp& w, int64_t target) {
  AsyncState& state = *w.async;
  for (int64_t k = 0; k < target - state.matrix_finished; ++k) {
    MatrixGroup& group = state.matrix_groups[k];
    for (auto& work : group.work) work();
    for (const auto& [address, bytes] : group.held) w.block->shared.hold(address, bytes, -1);
    group.work.clear();
    group.held.clear();
  }
}

// wgmma is one operation of four warps: when it is over for one, it has read what all of them read.
void run_wait(Warp& w, const Instruction& in) {
  need_warpgroup(w);
  AsyncState& state = *w.async;
  Block& block = *w.block;
  const int64_t count = static_cast<int64_t>(state.matrix_groups.size()) - in.value[0];
  if (count <= 0) return;
  const int64_t target = state.matrix_finished + count;
  const int first = w.index / 4 * 4;
  for (int p = first; p < first + 4; ++p) {
    const AsyncState& peer = *block.warps[p]->async;
    if (peer.matrix_finished + static_cast<int64_t>(peer.matrix_groups.size()) >= target) continue;
    w.polls = w.poll_stamp == block.events ? w.polls + 1 : 1;  // that warp has not come so far
    w.poll_stamp = block.events;
    w.next = w.pc;
    w.yield();
    return;
  }
  w.polls = 0;
  for (int p = first; p < first + 4; ++p) {
    finish_groups(*block.warps[p], target);
    if (p == w.index) continue;
    Clock& heard = block.clocks[w.index];
    heard[p] = std::max(heard[p], block.clocks[p][p]);
    block.clocks.tick(p);
  }
  state.matrix_groups.erase(state.matrix_groups.begin(), state.matrix_groups.begin() + count);
  state.matrix_finished = target;
  // Registers are free if no later group has them.
  for (uint8_t& s : w.register_state) s &= static_cast<uint8_t>(~(kAccumulating | kFeeding));
  auto hold = [&](const MatrixGroup& later) {
    for (int32_t offset : later.accumulators) w.register_state[offset / 64] |= kAccumulating;
    for (int32_t offset : later.inputs) w.register_state[offset / 64] |= kFeeding;
  };
  for (const MatrixGroup& later : state.matrix_groups) hold(later);
  hold(state.matrix_open);
}

// wgmma.mma_async.sync.aligned.m64nNkK.f32.type.type d, a, b, scale-d, scale-a, scale-b [, trans-a], trans-b
void multiply(Decoder& s) {
  std::string shape = s.take_first();
  const size_t n_at = shape.find('n'), k_at = shape.find('k');
  if (shape.compare(0, 4, "m64n") != 0 || k_at == std::string::npos) s.unknown("unknown shape");
  s.in.value[0] = std::stoi(shape.substr(n_at + 1));
  s.in.value[3] = std::stoi(shape.substr(k_at + 1));
  const std::string d = s.take_first(), a = s.take_first(), b = s.take_first();
  s.in.value[1] = a == "f16" ? 0 : a == "bf16" ? 1 : a == "tf32" ? 2 : -1;
  if (d != "f32" || a != b || s.in.value[1] < 0 || s.in.value[3] != (a == "tf32" ? 8 : 16)) s.unknown("unknown types");
  if (s.in.value[0] % 8 || s.in.value[0] < 8 || s.in.value[0] > 256) s.unknown("unknown shape");
  s.in.list = s.vector(0, Type::f32);
  s.in.list_is_written = true;
  if (s.in.list.size() != static_cast<size_t>(s.in.value[0] / 2)) s.unknown("wrong number of registers");
  const bool in_registers = s.is_vector(1);
  if (in_registers) {
    s.in.list_b = s.vector(1, Type::b32);
    if (s.in.list_b.size() != 4) s.unknown("wrong number of registers");
  } else {
    s.in.a = s.source(1, Type::b64);
  }
  s.in.b = s.source(2, Type::b64);
  s.in.c = s.source(3, Type::pred);
  s.in.value[2] = in_registers;
  if (s.immediate(4) < 0) s.in.value[2] |= 8;
  if (s.immediate(5) < 0) s.in.value[2] |= 16;
  int at = 6;
  if (a != "tf32") {
    if (!in_registers && s.immediate(at++)) s.in.value[2] |= 2;
    if (s.immediate(at)) s.in.value[2] |= 4;
  }
  s.in.execute = run;
}

void wgmma(Decoder& s) {
  const std::string what = s.take_first();
  s.need("sync");
  s.need("aligned");
  if (what == "fence") {
    s.in.execute = [](Warp& w, const Instruction&) {
      need_warpgroup(w);
      w.async->matrix_fenced = true;
    };
  } else if (what == "commit_group") {
    s.in.execute = run_commit;
  } else if (what == "wait_group") {
    s.in.value[0] = s.immediate(0);
    s.in.execute = run_wait;
  } else if (what == "mma_async") {
    multiply(s);
  } else {
    s.unknown("unknown form");
  }
}

}  // namespace

void wgmma_instructions(Table& table) { table.add({"wgmma"}, "", Class::matrix, wgmma); }

}  // namespace emulator
