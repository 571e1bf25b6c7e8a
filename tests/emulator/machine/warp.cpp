// Divergence and reconvergence: the splits of a warp, the joins they meet at, exits and collectives.
#include "machine.h"

#include <algorithm>

namespace emulator {

uint64_t Warp::lane_value(const Operand& o, int lane) const {
  switch (o.bytes) {
    case 1:
      return in<uint8_t>(o)[lane];
    case 2:
      return in<uint16_t>(o)[lane];
    case 4:
      return in<uint32_t>(o)[lane];
    case 8:
      return in<uint64_t>(o)[lane];
    default:
      return predicate(o) >> lane & 1;
  }
}

void Warp::set_lane_value(const Operand& o, int lane, uint64_t value) const {
  switch (o.bytes) {
    case 1:
      out<uint8_t>(o)[lane] = static_cast<uint8_t>(value);
      break;
    case 2:
      out<uint16_t>(o)[lane] = static_cast<uint16_t>(value);
      break;
    case 4:
      out<uint32_t>(o)[lane] = static_cast<uint32_t>(value);
      break;
    case 8:
      out<uint64_t>(o)[lane] = value;
      break;
    default:
      *out<uint32_t>(o) = (*out<uint32_t>(o) & ~(1u << lane)) | static_cast<uint32_t>(value & 1) << lane;
  }
}

uint64_t Warp::uniform(const Operand& o) const {
  const int first = __builtin_ctz(mask);
  const uint64_t value = lane_value(o, first);
  for (int lane = first + 1; lane < 32; ++lane)
    if (mask >> lane & 1 && lane_value(o, lane) != value)
      throw Fault("lanes differ in an operand that must be uniform");
  return value;
}

void Warp::start(const Function& kernel, uint32_t lanes) {
  exists = alive = lanes;
  splits = {Split{0, lanes, -1, make_frame(kernel), 0}};
  entry = splits[0].frame.get();
  const auto& params = block->launch->params;
  for (int lane = 0; lane < 32 && !params.empty(); ++lane)
    std::memcpy(entry->param(lane), params.data(), params.size());
  local_bytes = kernel.local_bytes;
  local.assign(32 * local_bytes, 0xff);
  local_state.assign(32 * local_bytes, 0);
  select(0);
}

void Warp::select(size_t split) {
  current = split;
  const Split& now = splits[split];
  pc = now.pc;
  active = now.active;
  frame = now.frame.get();
  base[0] = frame->registers;
  base[1] = const_cast<uint8_t*>(frame->function->constants.data());
}

void Warp::store() { splits[current].pc = pc; }

bool Warp::pick() {
  const size_t count = splits.size();
  for (size_t i = 1; i <= count; ++i) {
    const size_t candidate = (current + i) % count;
    if (splits[candidate].collecting) continue;
    select(candidate);
    return true;
  }
  uint32_t waiting = 0;
  for (const Split& split : splits) waiting |= split.collecting;
  select(0);  // the error names the place where lanes wait
  throw Fault("collective with missing lanes: lanes " + hex(waiting) + " wait for lanes that will not come", waiting);
}

void Warp::drop_current() {
  splits.erase(splits.begin() + static_cast<long>(current));
  if (splits.empty()) {
    wait = Wait::done;
    active = 0;
    return;
  }
  if (current >= splits.size()) current = 0;
  current = (current + splits.size() - 1) % splits.size();
  pick();
}

// The current split is at the join it belongs to.
void Warp::arrive(uint32_t lanes) {
  Split& split = splits[current];
  Join& join = joins[split.join];
  join.arrived |= lanes;
  if (join.arrived != join.expected) {
    drop_current();
    return;
  }
  free_joins.push_back(split.join);
  split.active = join.expected;
  split.join = join.parent;
  active = split.active;
}

int Warp::new_join(Join join) {
  if (free_joins.empty()) {
    joins.push_back(std::move(join));
    return static_cast<int>(joins.size()) - 1;
  }
  const int at = free_joins.back();
  free_joins.pop_back();
  joins[at] = std::move(join);
  return at;
}

// Lanes will not come to the joins from `join` outwards, `until` excluded.
void Warp::leave(uint32_t lanes, int join, int until) {
  for (; join != until; join = joins[join].parent) {
    Join& one = joins[join];
    one.expected &= ~lanes;
    one.arrived &= ~lanes;
    if (one.expected != one.arrived) continue;
    free_joins.push_back(join);
    if (!one.expected) continue;
    Split back{one.pc, one.expected, one.parent, one.frame, 0};
    if (one.pc == kReturn) {  // the others had returned already
      copy_results(*one.frame, one.expected);
      back.pc = one.frame->return_pc;
      back.frame = one.frame->caller;
    }
    splits.push_back(std::move(back));
  }
}

void Warp::exit_lanes(uint32_t lanes) {
  alive &= ~lanes;
  leave(lanes, splits[current].join, -1);
  for (const Split& split : splits)
    if (split.collecting & lanes) throw Fault("collective with missing lanes", lanes);
  Split& split = splits[current];
  split.active &= ~lanes;
  active = split.active;
  if (!active) {
    drop_current();
    next = pc;
  }
  if (!alive) block->warp_left();
}

void Warp::jump(uint32_t taken, const Instruction& in) {
  if (taken == active) {
    next = in.target;
    return;
  }
  if (!taken) return;
  Split& split = splits[current];
  int join = split.join;
  if (in.join >= 0 && !(join >= 0 && joins[join].pc == in.join)) {
    join = new_join({in.join, active, 0, split.join, split.frame});
  }
  Split other = split;
  other.pc = in.target;
  other.active = taken;
  other.join = join;
  split.active = active & ~taken;
  split.join = join;
  active = split.active;
  splits.push_back(std::move(other));
}

bool Warp::collect(uint32_t members, const char* name) {
  const uint32_t need = members & exists;
  if (mask & ~members)
    throw Fault(std::string(name) + ": collective with missing lanes: a lane is not in its own mask");
  if (!(need & ~mask)) {
    block->clocks.meet(index, mask);
    return true;
  }
  if (need & ~alive)
    throw Fault(std::string(name) + ": collective with missing lanes: the mask names lanes that have exited");
  auto waits_here = [&](const Split& split) {
    return split.collecting && split.members == members && split.pc == pc && split.frame.get() == frame;
  };
  uint32_t here = mask;
  for (const Split& split : splits)
    if (waits_here(split)) here |= split.collecting;
  if (need & ~here) {
    if (mask != active)
      throw Fault(std::string(name) + ": collective with missing lanes: the predicate excludes lanes of the mask");
    splits[current].collecting = mask;
    splits[current].members = members;
    splits[current].pc = pc;
    pick();
    next = pc;
    return false;
  }
  for (Split& split : splits)
    if (waits_here(split)) {
      split.collecting = 0;
      split.pc = pc + 1;
    }
  mask = here;
  block->clocks.meet(index, mask);
  return true;
}

}  // namespace emulator
