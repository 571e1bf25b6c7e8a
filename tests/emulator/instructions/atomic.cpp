// atom and red: one lane after the other, each at once.
#include "access.h"
#include "families.h"
#include "hopper.h"
#include "reductions.h"

namespace emulator {

Space take_space(Decoder& s);
Order take_order_and_hints(Decoder& s);

namespace {

void run(Warp& w, const Instruction& in) {
  const int operation = static_cast<int>(in.value[0]), element = static_cast<int>(in.value[1]);
  const auto apply = reinterpret_cast<Reduce>(in.value[2]);
  const size_t count = in.list_b.size();
  const int bytes = element * static_cast<int>(count);
  Launch& launch = *w.block->launch;
  const auto lock = launch.strong_access();
  const auto order = static_cast<Order>(in.value[3]);
  if (releases(order)) w.block->order.fence(w.index, true);
  Traffic traffic;
  each_lane(w.mask, [&](int lane) {
    const uint64_t address = lane_address(w, in.a, lane);
    uint8_t* at = access_memory(w, in.space, address, bytes, Access::atomic, lane, &traffic);
    bool changed = false;
    for (size_t k = 0; k < count; ++k, at += element) {
      uint8_t old[16];
      std::memcpy(old, at, element);
      const Operand& b = in.list_b[k];
      const uint8_t* c = in.c.present ? w.in<uint8_t>(in.c) + lane * in.c.bytes : nullptr;
      apply(operation, at, w.in<uint8_t>(b) + lane * b.bytes, c);
      changed |= std::memcmp(at, old, element) != 0;
      if (!in.list.empty() && in.list[k].present)
        std::memcpy(w.out<uint8_t>(in.list[k]) + lane * element, old, element);
    }
    if (changed) w.block->changed();
    // Nobody can tell that it wrote what was there, so that publishes nothing: a failed cas.
    if (changed && launch.check_races && address >> kSpaceShift == 0 && in.space != Space::shared)
      w.block->order.release(w.index, address, bytes, !releases(order) && in.list.empty());
  });
  if (launch.schedule != Schedule::in_order && w.block->random() % 8 == 0) w.yield();
  traffic.finish(w, in, Access::atomic);
}

void atomic(Decoder& s) {
  const bool returns = s.opcode() == "atom";
  s.in.value[3] = static_cast<int64_t>(take_order_and_hints(s));
  if (!returns && s.take("async")) return async_reduce(s);
  s.take("noftz");
  const bool policy = s.take("L2::cache_hint");
  s.in.space = take_space(s);
  s.in.value[0] = take_reduction(s);
  const std::string vector = s.take_one({"v2", "v4", "v8"});
  const Type t = s.type();
  const int operation = static_cast<int>(s.in.value[0]), count = vector.empty() ? 1 : vector[1] - '0';
  const bool known = count == 1 ? has_reduction(operation, t)
                                : has_wide_reduction(operation, t) && !is_integer(t) && bytes_of(t) <= 4 &&
                                      count * bytes_of(t) <= 16 && s.in.space != Space::shared;
  const bool returned = operation != kExch && operation != kCas;  // or it would be a store
  if (!known || (!returns && !returned)) s.unknown("no such combination of operation, type and vector");
  s.in.value[1] = bytes_of(t);
  s.in.value[2] = reinterpret_cast<int64_t>(reduce_of(t));
  int at = 0;
  s.in.list_is_written = true;
  if (returns) s.in.list = s.vector(at++, t);
  s.in.a = s.address(at++);
  s.in.list_b = s.vector(at++, t);
  if (s.in.value[0] == kCas) s.in.c = s.source(at++, t);
  if (policy) s.source(at++, Type::b64);
  if (s.in.list_b.size() != static_cast<size_t>(count) || (returns && s.in.list.size() != static_cast<size_t>(count)))
    s.unknown("vector of another size");
  s.in.execute = run;
}

}  // namespace

void atomic_instructions(Table& table) { table.add({"atom", "red"}, "", Class::atomic, atomic); }

}  // namespace emulator
