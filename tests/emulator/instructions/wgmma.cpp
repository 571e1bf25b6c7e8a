// wgmma: D (64 x N) += A (64 x K) B (K x N) by a warpgroup; warp w of it has rows 16w to 16w + 15, as for mma.sync.
//
// A is in shared memory or in registers, B in shared memory, given by descriptors. Operands are read at issue (early),
// at the wait (late), or either (random); accumulators belong to the instruction until the wait.
#include <algorithm>
#include <cstring>

#include "families.h"
#include "wgmma.h"

#include "../machine/async_copy.h"

namespace emulator {

namespace {

void need_warpgroup(Warp& w) {
  if (w.mask != kAll) throw Fault("wgmma: collective with missing lanes: all 128 must take part", ~w.mask);
  if (w.block->warps.size() < static_cast<size_t>(w.index / 4 * 4 + 4)) throw Fault("wgmma: no whole warpgroup");
}

void run_fence(Warp& w, const Instruction&) {
  need_warpgroup(w);
  AsyncState& state = *w.async;
  if (w.matrix_frame != w.frame) {
    if (!state.matrix_groups.empty()) throw Fault("wgmma: accumulators in flight across a call are not modelled");
    w.matrix_frame = w.frame;
    w.register_state.assign(w.frame->function->register_bytes / 64 + 1, 0);
  }
  for (uint8_t& one : w.register_state) one &= static_cast<uint8_t>(~kTouched);
}

// The registers belong to the instruction until the wait: accumulators are poisoned and live on in AsyncState.
void take_registers(Warp& w, const Instruction& in) {
  AsyncState& state = *w.async;
  auto state_of = [&](const Operand& o) -> uint8_t& {
    uint8_t& s = w.register_state[o.offset / 64];
    if (s & kTouched) throw Fault("wgmma: an instruction wrote one of its registers and no wgmma.fence followed");
    return s;
  };
  if (in.value[2] & 1)
    for (const Operand& o : in.list_b) {
      uint8_t& s = state_of(o);
      if (s & kAccumulating) throw Fault("wgmma: accumulator read before wgmma.wait_group");
      s |= kFeeding;
      state.matrix_open.inputs.push_back(o.offset);
    }
  state.accumulators.resize(w.frame->function->register_bytes);
  for (const Operand& o : in.list) {
    uint8_t& s = state_of(o);
    uint8_t* lanes = w.frame->registers + o.offset;
    if (!(s & kAccumulating)) std::memcpy(state.accumulators.data() + o.offset, lanes, 32 * 4);
    std::memset(lanes, 0xff, 32 * 4);
    s |= kAccumulating;
    state.matrix_open.accumulators.push_back(o.offset);
  }
}

void run(Warp& w, const Instruction& in) {
  need_warpgroup(w);
  AsyncState& state = *w.async;
  Matrix m{w.block, &w, w.frame->registers, &in, 0, w.uniform(in.b), true};
  if (!(in.value[2] & 1)) m.a = w.uniform(in.a);
  const uint32_t scale = w.predicate(in.c);
  if (scale != 0 && scale != kAll) throw Fault("wgmma: lanes differ in scale-d");
  m.accumulate = scale != 0;
  if (w.matrix_frame != w.frame) throw Fault("wgmma: no wgmma.fence before it");
  // The four warps must issue the same.
  const uint64_t what = in.id * 0x9e3779b97f4a7c15ULL ^ m.a * 31 ^ m.b * 17 ^ m.accumulate;
  auto& log = w.block->matrix_log[w.index / 4];
  if (w.matrix_count < log.size() && log[w.matrix_count] != what)
    throw Fault("wgmma: the warps of the warpgroup issue different instructions");
  if (w.matrix_count >= log.size()) log.push_back(what);
  ++w.matrix_count;
  take_registers(w, in);
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
  w.block->happened();
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

// Registers of the oldest groups are the warp's again unless a later group has them.
void give_back_registers(Warp& w, int64_t groups) {
  AsyncState& state = *w.async;
  std::vector<int32_t> finished;
  for (int64_t k = 0; k < groups; ++k) {
    const auto& one = state.matrix_groups[k].accumulators;
    finished.insert(finished.end(), one.begin(), one.end());
  }
  state.matrix_groups.erase(state.matrix_groups.begin(), state.matrix_groups.begin() + groups);
  state.matrix_finished += groups;
  for (uint8_t& s : w.register_state) s &= static_cast<uint8_t>(~(kAccumulating | kFeeding));
  auto hold = [&](const MatrixGroup& later) {
    for (int32_t offset : later.accumulators) w.register_state[offset / 64] |= kAccumulating;
    for (int32_t offset : later.inputs) w.register_state[offset / 64] |= kFeeding;
  };
  for (const MatrixGroup& later : state.matrix_groups) hold(later);
  hold(state.matrix_open);
  for (int32_t offset : finished)
    if (!(w.register_state[offset / 64] & kAccumulating))
      std::memcpy(w.base[0] + offset, state.accumulators.data() + offset, 32 * 4);
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
  give_back_registers(w, count);
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
  s.in.is_warpgroup = true;
  const std::string what = s.take_first();
  s.need("sync");
  s.need("aligned");
  if (what == "fence") {
    s.in.execute = run_fence;
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
