// mbarrier: init inval arrive arrive_drop expect_tx complete_tx test_wait try_wait pending_count;
// cp.async.mbarrier.arrive.
//
// A phase is over when no arrivals are pending and the bytes that were expected have come.
#include "access.h"
#include "families.h"
#include "hopper.h"

#include "../machine/async_copy.h"

#include <algorithm>

namespace emulator {

constexpr int64_t kMost = (1 << 20) - 1;

MBarrier& find_mbarrier(Block& block, uint32_t address) {
  auto found = block.mbarriers.find(address);
  if (found == block.mbarriers.end())
    throw Fault("mbarrier: none was initialised at shared byte " + std::to_string(address - block.shared.base()));
  return found->second;
}

void check_mbarrier(Block& block, uint32_t, MBarrier& barrier) {
  if (barrier.pending || barrier.transactions) return;
  ++barrier.phase;
  barrier.pending = barrier.expected;
  barrier.done_before = std::move(barrier.done);
  barrier.done = std::move(barrier.arriving);
  barrier.arriving = {};
  block.happened();
}

void expect_transactions(MBarrier& barrier, int64_t bytes) {
  barrier.transactions += bytes;
  if (barrier.transactions > kMost || barrier.transactions < -kMost)
    throw Fault("mbarrier: overflow of the transaction count, " + std::to_string(barrier.transactions));
}

void arrive_mbarrier(Block& block, MBarrier& barrier, int actor, int64_t count) {
  if (count < 1 || count > barrier.pending)
    throw Fault("mbarrier: overflow, " + std::to_string(count) + " arrivals where " + std::to_string(barrier.pending) +
                " are pending");
  join(barrier.arriving, block.clocks[actor]);
  block.clocks.tick(actor);
  barrier.pending -= count;
  block.changed();
}

void complete_transactions(Block& block, uint32_t address, int64_t bytes) {
  MBarrier& barrier = find_mbarrier(block, address);
  join(barrier.arriving, block.clocks[block.copy_actor()]);
  expect_transactions(barrier, -bytes);
  block.changed();
  check_mbarrier(block, address, barrier);
}

namespace {

uint32_t address_of(Warp& w, const Operand& o, int lane) {
  const auto address = static_cast<uint32_t>(lane_address(w, o, lane));
  Memory::check_alignment("shared", address, 8, lane);
  return address;
}
MBarrier& barrier_of(Warp& w, uint32_t address, int lane) {  // its initialisation must have been heard of
  w.block->shared.read(w.index, address, 8, lane);
  return find_mbarrier(*w.block, address);
}

void run_init(Warp& w, const Instruction& in) {
  each_lane(w.mask, [&](int lane) {
    const uint32_t address = address_of(w, in.a, lane);
    const auto count = static_cast<int64_t>(w.lane_value(in.b, lane));
    if (count < 1 || count > kMost)
      throw Fault("mbarrier: count " + std::to_string(count) + " out of bounds", 1u << lane);
    std::memset(w.block->shared.write(w.index, address, 8, lane), 0, 8);
    MBarrier made;
    made.pending = made.expected = count;
    w.block->mbarriers[address] = made;
    w.block->changed();
  });
}

void run_invalidate(Warp& w, const Instruction& in) {
  each_lane(w.mask, [&](int lane) {
    const uint32_t address = address_of(w, in.a, lane);
    find_mbarrier(*w.block, address);
    w.block->shared.write(w.index, address, 8, lane);
    w.block->mbarriers.erase(address);
    w.block->changed();
  });
}

// The state that an arrival returns: the phase and, below it, what was pending before.
constexpr int kPendingBits = 20;
constexpr int64_t kPendingMask = (int64_t{1} << kPendingBits) - 1;

// value: [0] expects transactions, [1] drops, [2] may not complete the phase
void run_arrive(Warp& w, const Instruction& in) {
  each_lane(w.mask, [&](int lane) {
    const uint32_t address = address_of(w, in.a, lane);
    MBarrier& barrier = barrier_of(w, address, lane);
    const int64_t operand = in.b.present ? static_cast<int64_t>(w.lane_value(in.b, lane)) : 1;
    const int64_t state = barrier.phase << kPendingBits | barrier.pending, count = in.value[0] ? 1 : operand;
    if (in.value[0]) expect_transactions(barrier, operand);
    arrive_mbarrier(*w.block, barrier, w.index, count);
    if (in.value[2] && !barrier.pending && !barrier.transactions)
      throw Fault("mbarrier: arrive.noComplete completes the phase", 1u << lane);
    if (in.value[1]) barrier.expected -= count;
    if (in.d.present) w.out<uint64_t>(in.d)[lane] = static_cast<uint64_t>(state);
    check_mbarrier(*w.block, address, barrier);
  });
}

void run_transactions(Warp& w, const Instruction& in) {
  each_lane(w.mask, [&](int lane) {
    const uint32_t address = address_of(w, in.a, lane);
    MBarrier& barrier = barrier_of(w, address, lane);
    const auto bytes = static_cast<int64_t>(w.lane_value(in.b, lane));
    expect_transactions(barrier, in.value[0] ? -bytes : bytes);
    w.block->changed();
    check_mbarrier(*w.block, address, barrier);
  });
}

// Whether the phase of this parity is over. Only the current phase and the one before may be asked for. Which one a
// warp means follows from what it has heard of: of phases up to h. A lawful program means h or h + 1, whichever has the
// parity; further ahead it could not know whether the phase that it means is the next one of that parity. So it lags if
// two phases have ended of which it has not heard, or one, when its parity says that it does not ask for that one.
bool parity_done(Warp& w, const MBarrier& barrier, int64_t parity) {
  const bool over = (barrier.phase & 1) != parity;
  if (!w.block->shared.checks_races()) return over;  // atomics did not spread what their warps have heard of
  const Clock& clock = w.block->clocks[w.index];
  if (!covers(clock, barrier.done) && (!over || !covers(clock, barrier.done_before)))
    throw Fault("mbarrier: parity lag, the warp asks for parity " + std::to_string(parity) + " when phase " +
                std::to_string(barrier.phase) + " has begun, and does not know that phase " +
                std::to_string(barrier.phase - 1) + " is over");
  return over;
}

// The same for the state that an arrival returned.
bool state_done(const MBarrier& barrier, int64_t phase) {
  if (barrier.phase > phase + 1)
    throw Fault("mbarrier: lag, the state is of phase " + std::to_string(phase) + ", but phase " +
                std::to_string(barrier.phase) + " has begun");
  return barrier.phase != phase;
}

void run_test(Warp& w, const Instruction& in) {
  uint32_t result = 0;
  Block& block = *w.block;
  if (w.poll_stamp != block.events) w.polled.clear();
  each_lane(w.mask, [&](int lane) {
    const uint32_t address = address_of(w, in.a, lane);
    MBarrier& barrier = barrier_of(w, address, lane);
    const auto operand = static_cast<int64_t>(w.lane_value(in.b, lane));
    if (in.value[0] && operand > 1) throw Fault("mbarrier: parity is 0 or 1", 1u << lane);
    const bool over = in.value[0] ? parity_done(w, barrier, operand) : state_done(barrier, operand >> kPendingBits);
    if (!over) {
      if (std::find(w.polled.begin(), w.polled.end(), address) == w.polled.end()) w.polled.push_back(address);
      return;
    }
    result |= 1u << lane;
    join(block.clocks[w.index], barrier.done);
    block.clocks.meet(w.index, 1u << lane);
  });
  w.set_predicate(in.d, result);
  if (result == w.mask) {
    w.polls = 0;
    w.polled.clear();
    return;
  }
  w.polls = w.poll_stamp == block.events ? w.polls + 1 : 1;
  w.poll_stamp = w.splits[w.current].poll_stamp = block.events;
  w.yield();
}

void mbarrier(Decoder& s) {
  const std::string what = s.take_one(
      {"init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "test_wait", "try_wait", "pending_count"});
  s.take_one({"release", "relaxed", "acquire"});
  s.take_one({"cta", "cluster"});
  s.take_one({"shared", "shared::cta", "shared::cluster"});
  const bool expects = (what == "arrive" || what == "arrive_drop") && s.take("expect_tx");
  s.in.value[2] = s.take("noComplete");
  const bool parity = s.take("parity");
  s.need("b64");
  if (what == "init" || what == "expect_tx" || what == "complete_tx") {
    s.in.a = s.address(0);
    s.in.b = s.source(1, Type::b32);
    s.in.value[0] = what == "complete_tx";
    s.in.execute = what == "init" ? run_init : run_transactions;
  } else if (what == "inval") {
    s.in.a = s.address(0);
    s.in.execute = run_invalidate;
  } else if (what == "arrive" || what == "arrive_drop") {
    const bool no_state = s.is_memory(0);  // arrivals at shared::cluster return none
    if (!no_state) s.in.d = s.out(0, Type::b64);
    s.in.a = s.address(no_state ? 0 : 1);
    if (s.count() > (no_state ? 1 : 2)) s.in.b = s.source(no_state ? 1 : 2, Type::b32);
    s.in.value[0] = expects;
    s.in.value[1] = what == "arrive_drop";
    s.in.execute = run_arrive;
  } else if (what == "test_wait" || what == "try_wait") {
    s.in.d = s.out(0, Type::pred);
    s.in.a = s.address(1);
    s.in.b = s.source(2, parity ? Type::b32 : Type::b64);
    if (s.count() > 3) s.source(3, Type::b32);  // a time limit
    s.in.value[0] = parity;
    s.in.execute = run_test;
  } else if (what == "pending_count") {
    s.in.d = s.out(0, Type::b32);
    s.in.a = s.source(1, Type::b64);
    s.in.execute = [](Warp& w, const Instruction& in) {
      each_lane(w.mask, [&](int lane) {
        w.out<uint32_t>(in.d)[lane] = static_cast<uint32_t>(w.in<uint64_t>(in.a)[lane] & kPendingMask);
      });
    };
  } else {
    s.unknown("unknown form");
  }
}

}  // namespace

// The arrival happens when the thread's earlier cp.async have landed.
void cp_async_arrive(Decoder& s) {
  s.need("arrive");
  s.in.value[0] = s.take("noinc");
  s.take_one({"shared", "shared::cta"});
  s.need("b64");
  s.in.a = s.address(0);
  s.in.execute = [](Warp& w, const Instruction& in) {
    each_lane(w.mask, [&](int lane) {
      Block& block = *w.block;
      const uint32_t address = address_of(w, in.a, lane);
      MBarrier& barrier = barrier_of(w, address, lane);
      if (!in.value[0]) ++barrier.pending;
      CpGroup copies = w.async->open[lane];
      for (const CpGroup& group : w.async->groups[lane]) copies.insert(copies.end(), group.begin(), group.end());
      const int actor = w.index;
      auto land = [&block, address, copies, actor, lane] {
        for (const auto& copy : copies) complete(block, actor, *copy, lane);
        MBarrier& there = find_mbarrier(block, address);
        arrive_mbarrier(block, there, actor, 1);
        check_mbarrier(block, address, there);
      };
      if (block.launch->copies == Copies::early)
        land();
      else
        block.flights.push_back({land, address});
    });
  };
}

void mbarrier_instructions(Table& table) { table.add({"mbarrier"}, "", Class::barrier, mbarrier); }

}  // namespace emulator
