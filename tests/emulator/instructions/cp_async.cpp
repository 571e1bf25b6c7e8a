// cp.async: copies of 4, 8 or 16 bytes per thread from global to shared memory, in groups.
//
// The bytes move when they are issued, committed or waited for (early, random, late); until the wait nobody may touch
// the destination, which holds a NaN pattern while they have not moved.
#include "access.h"
#include "families.h"
#include "hopper.h"

#include "../machine/async_copy.h"

namespace emulator {

Space take_space(Decoder& s);

void move_bytes(Block& block, CpAsync& copy, int lane) {
  if (copy.moved) return;
  copy.moved = true;
  uint8_t* to = block.shared.raw(copy.to);
  std::memset(to, 0, copy.bytes);
  if (copy.read) std::memcpy(to, block.launch->memory.at(copy.from, copy.read, false, lane), copy.read);
}

void complete(Block& block, int actor, CpAsync& copy, int lane) {
  if (copy.done) return;
  move_bytes(block, copy, lane);
  copy.done = true;
  block.changed();
  if (copy.read) global_memory(block, actor, copy.from, copy.read, Access::read, lane);  // it may have read only now
  block.shared.land(actor, copy.to, copy.bytes, nullptr);
}

namespace {

void run_copy(Warp& w, const Instruction& in) {
  Block& block = *w.block;
  const int bytes = static_cast<int>(in.value[0]);
  Traffic traffic;
  each_lane(w.mask, [&](int lane) {
    auto copy = std::make_shared<CpAsync>();
    copy->to = static_cast<uint32_t>(lane_address(w, in.d, lane));
    copy->from = lane_address(w, in.a, lane);
    copy->bytes = bytes;
    copy->read = in.b.present ? static_cast<int>(w.lane_value(in.b, lane)) : bytes;
    if (in.c.present && w.predicate(in.c) >> lane & 1) copy->read = 0;
    if (copy->read < 0 || copy->read > bytes)
      throw Fault("cp.async: source size " + std::to_string(copy->read) + " of a copy of " + std::to_string(bytes),
                  1u << lane);
    Memory::check_alignment("shared", copy->to, bytes, lane);
    Memory::check_alignment("global", copy->from, bytes, lane);
    if (copy->read) {
      global_memory(block, w.index, copy->from, copy->read, Access::read, lane);
      traffic.add_global(copy->from, copy->read);
    }
    traffic.add_shared(copy->to, bytes, lane);
    block.changed();
    block.shared.begin_copy(w.index, copy->to, bytes, Pending::cp_async, lane);
    const Copies when = block.launch->copies;
    if (when == Copies::early || (when == Copies::random && block.random() % 2))
      move_bytes(block, *copy, lane);
    else
      block.shared.poison(copy->to, bytes);
    w.async->open[lane].push_back(std::move(copy));
  });
  traffic.finish(w, in, Access::read);
}

void run_commit(Warp& w, const Instruction&) {
  AsyncState& state = *w.async;
  each_lane(w.mask, [&](int lane) {
    if (w.block->launch->copies == Copies::random && w.block->random() % 2)
      for (auto& copy : state.open[lane]) move_bytes(*w.block, *copy, lane);
    state.groups[lane].push_back(std::move(state.open[lane]));
    state.open[lane].clear();
  });
}

void run_wait(Warp& w, const Instruction& in) {
  AsyncState& state = *w.async;
  each_lane(w.mask, [&](int lane) {
    while (static_cast<int64_t>(state.groups[lane].size()) > in.value[0]) {
      for (auto& copy : state.groups[lane].front()) complete(*w.block, w.index, *copy, lane);
      state.groups[lane].pop_front();
    }
    if (!in.value[1]) return;
    for (auto& copy : state.open[lane]) complete(*w.block, w.index, *copy, lane);
    state.open[lane].clear();
  });
}

void cp_async(Decoder& s) {
  s.need("async");
  if (s.take("bulk")) return bulk(s);
  if (s.take("commit_group")) {
    s.in.execute = run_commit;
    return;
  }
  if (s.take("wait_group")) {
    s.in.value[0] = s.immediate(0);
    s.in.execute = run_wait;
    return;
  }
  if (s.take("wait_all")) {
    s.in.value[1] = 1;
    s.in.execute = run_wait;
    return;
  }
  if (s.take("mbarrier")) return cp_async_arrive(s);
  const bool through_l2 = s.take("cg");
  if (!through_l2) s.need("ca");
  s.take_one({"shared", "shared::cta"});
  s.need("global");
  const bool policy = s.take("L2::cache_hint");
  s.take_starting("L2::");
  s.in.d = s.address(0);
  s.in.a = s.address(1);
  const int64_t bytes = s.immediate(2);
  if (bytes != 16 && (through_l2 || (bytes != 4 && bytes != 8)))
    s.unknown("copy of " + std::to_string(bytes) + " bytes");
  s.in.value[0] = bytes;
  int at = 3;
  if (s.count() - policy > 3) {
    const Operand extra = s.any_source(at++, Type::b32);
    (extra.bytes ? s.in.b : s.in.c) = extra;
  }
  if (policy) s.source(at, Type::b64);
  s.in.execute = run_copy;
}

}  // namespace

void cp_async_instructions(Table& table) {
  table.add({"cp"}, "", Class::async, [](Decoder& s) { s.take("reduce") ? bulk_reduce(s) : cp_async(s); });
}

}  // namespace emulator
