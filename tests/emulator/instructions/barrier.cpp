// Barriers of the block: bar and barrier with sync, arrive and red; of the warp: bar.warp.sync; of a cluster of one.
#include "families.h"
#include "groups.h"

namespace emulator {

namespace {

int id_of(Warp& w, const Operand& o) {
  const uint64_t id = w.uniform(o);
  if (id > 15) throw Fault("barrier " + std::to_string(id) + " does not exist: there are 16");
  return static_cast<int>(id);
}

void run_barrier(Warp& w, const Instruction& in) {
  if (w.loose && !w.collect(w.alive, "barrier")) return;
  const bool counted = in.b.present;
  Block& block = *w.block;
  block.arrive(block.barriers[id_of(w, in.a)], w, in.value[0] != 0, counted ? static_cast<int>(w.uniform(in.b)) : 0,
               !counted);
}

// The result is there when the barrier completes, so the instruction runs twice: arrival, then result.
void run_reduction(Warp& w, const Instruction& in) {
  Block& block = *w.block;
  const int id = id_of(w, in.a);
  Barrier& barrier = block.barriers[id];
  if (w.barrier != 32 + id) {  // not arrived yet
    const uint32_t votes = w.predicate(in.c) & w.mask;
    barrier.reduction_count += static_cast<uint32_t>(__builtin_popcount(votes));
    barrier.reduction_and &= votes == w.mask;
    barrier.reduction_or |= votes != 0;
    run_barrier(w, in);
    w.barrier = 32 + id;
    w.next = w.pc;
    return;
  }
  w.barrier = -1;
  const uint32_t result = barrier.results[in.value[1]];
  if (in.value[1] == 0)
    each_lane(w.mask, [&](int i) { w.out<uint32_t>(in.d)[i] = result; });
  else
    w.set_predicate(in.d, result ? kAll : 0);
}

constexpr char kWarpBarrier[] = "bar.warp.sync";

void barrier(Decoder& s) {
  if (s.take("cluster")) {  // one block: the cluster's barrier is number 15's equal, which nobody else uses
    const bool arrive = s.take("arrive"), wait = s.take("wait");
    if (!arrive && !wait) s.unknown("unknown form");
    s.take_one({"release", "relaxed", "acquire"});
    s.take("aligned");
    s.in.execute = wait ? [](Warp& w, const Instruction& in) {
      (void)in;
      if (!w.converged()) throw Fault("barrier.cluster: executed by diverged lanes");
      w.block->arrive(w.block->barriers[16], w, true, 0, true);
    } : [](Warp&, const Instruction&) {};
    return;
  }
  if (s.take("warp")) {
    s.need("sync");
    s.in.e = s.source(0, Type::b32);
    each_group<kWarpBarrier>(s, [](Warp&, const Instruction&) {});
    return;
  }
  s.take("cta");
  s.take("aligned");
  const bool reduces = s.take("red");
  const bool arrive = s.take("arrive");
  if (!reduces && !arrive) s.need("sync");
  s.in.value[0] = !arrive;
  int at = 0;
  if (reduces) {
    const bool popc = s.take("popc"), is_and = s.take("and");
    if (!popc && !is_and) s.need("or");
    const Type t = s.type();
    s.in.value[1] = popc ? 0 : is_and ? 1 : 2;
    s.in.d = s.out(at++, t);
  }
  s.in.a = s.source(at++, Type::b32);
  const int left = s.count() - at - (reduces ? 1 : 0);
  if (left) s.in.b = s.source(at++, Type::b32);
  if (reduces) s.in.c = s.source(at, Type::pred);
  s.in.execute = reduces ? run_reduction : run_barrier;
}

}  // namespace

void barrier_instructions(Table& table) { table.add({"bar", "barrier"}, "", Class::barrier, barrier); }

}  // namespace emulator
