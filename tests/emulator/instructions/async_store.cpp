// st.async and red.async: stores and reductions into shared memory of the cluster (of one block) that complete bytes of
// an mbarrier.
#include "access.h"
#include "hopper.h"
#include "reductions.h"

#include "../machine/async_copy.h"

namespace emulator {

namespace {

struct Target {
  uint32_t at, barrier;
};

Target target_of(Warp& w, const Instruction& in, int bytes, int lane) {
  const Target found{static_cast<uint32_t>(lane_address(w, in.a, lane)),
                     static_cast<uint32_t>(lane_address(w, in.e, lane))};
  Memory::check_alignment("shared", found.at, bytes, lane);
  w.block->shared.read(w.index, found.barrier, 8, lane);
  find_mbarrier(*w.block, found.barrier);
  return found;
}

void launch(Block& block, const std::function<void()>& land, uint32_t barrier) {
  block.changed();
  const Copies when = block.launch->copies;
  if (when == Copies::early || (when == Copies::random && block.random() % 4 == 0))
    land();
  else
    block.flights.push_back({land, barrier});
}

// value: [0] bytes of an element
void run_store(Warp& w, const Instruction& in) {
  Block& block = *w.block;
  const int element = static_cast<int>(in.value[0]), bytes = element * static_cast<int>(in.list.size());
  each_lane(w.mask, [&](int lane) {
    const Target target = target_of(w, in, bytes, lane);
    std::vector<uint8_t> data;
    for (const Operand& b : in.list) {
      const uint8_t* from = w.in<uint8_t>(b) + lane * b.bytes;
      data.insert(data.end(), from, from + element);
    }
    block.shared.begin_copy(w.index, target.at, bytes, Pending::bulk, lane);
    block.shared.poison(target.at, bytes);
    auto land = [&block, target, data, bytes] {
      const int actor = block.copy_actor();
      block.shared.land(actor, target.at, bytes, data.data());
      complete_transactions(block, target.barrier, bytes);
      block.clocks.tick(actor);
    };
    launch(block, land, target.barrier);
  });
}

// value: [0] bytes, [1] Reduction, [2] Reduce. The old value stays readable, so it is no copy in flight; whoever waits
// hears of the warp that issued it.
void run_reduce(Warp& w, const Instruction& in) {
  Block& block = *w.block;
  const int bytes = static_cast<int>(in.value[0]), operation = static_cast<int>(in.value[1]);
  const auto apply = reinterpret_cast<Reduce>(in.value[2]);
  each_lane(w.mask, [&](int lane) {
    const Target target = target_of(w, in, bytes, lane);
    const uint64_t value = w.lane_value(in.b, lane);
    const Clock issued = block.clocks[w.index];
    block.shared.atomic(w.index, target.at, bytes, lane);
    auto land = [&block, target, value, issued, operation, apply, bytes] {
      apply(operation, block.shared.raw(target.at), reinterpret_cast<const uint8_t*>(&value), nullptr);
      join(find_mbarrier(block, target.barrier).arriving, issued);
      complete_transactions(block, target.barrier, bytes);
    };
    launch(block, land, target.barrier);
  });
}

void take_completion(Decoder& s) {
  s.take("shared::cluster");
  s.need("mbarrier::complete_tx::bytes");
}

}  // namespace

void async_store(Decoder& s) {
  take_completion(s);
  const std::string vector = s.take_one({"v2", "v4"});
  const Type t = s.type();
  if (bytes_of(t) < 4 || facts(t).family == 'x' || (vector == "v4" && bytes_of(t) == 8)) s.unknown("unknown type");
  s.in.a = s.address(0);
  s.in.list = s.vector(1, t);
  s.in.e = s.address(2);
  if (s.in.list.size() != (vector.empty() ? 1u : static_cast<unsigned>(vector[1] - '0')))
    s.unknown("vector of another size");
  s.in.value[0] = bytes_of(t);
  s.in.execute = run_store;
}

void async_reduce(Decoder& s) {
  take_completion(s);
  const int operation = take_reduction(s);
  const Type t = s.type();
  const bool known = operation == kAdd ? is_integer(t) && bytes_of(t) >= 4
                                       : operation <= kDec && bytes_of(t) == 4 && has_reduction(operation, t);
  if (!known) s.unknown("no such combination of operation and type");
  s.in.a = s.address(0);
  s.in.b = s.source(1, t);
  s.in.e = s.address(2);
  s.in.value[0] = bytes_of(t);
  s.in.value[1] = operation;
  s.in.value[2] = reinterpret_cast<int64_t>(reduce_of(t));
  s.in.execute = run_reduce;
}

}  // namespace emulator
