// See access.h.
#include "access.h"

#include <algorithm>

namespace emulator {

namespace {

uint8_t* local_memory(Warp& w, uint64_t address, int bytes, Access access, int lane) {
  Memory::check_alignment("local", address, bytes, lane);
  if (address + bytes > static_cast<uint64_t>(w.local_bytes) || address > static_cast<uint64_t>(w.local_bytes))
    throw Fault("out of bounds: local access of " + std::to_string(bytes) + " bytes at byte " +
                    std::to_string(address) + " of " + std::to_string(w.local_bytes),
                1u << lane);
  const size_t at = lane * w.local_bytes + address;
  for (int i = 0; i < bytes; ++i) {
    if (reads_only(access) && !w.local_state[at + i])
      throw Fault("unwritten: read of local memory that this thread did not write, at local byte " +
                      std::to_string(address + i),
                  1u << lane);
    if (!reads_only(access)) w.local_state[at + i] = 1;
  }
  return w.local.data() + at;
}

uint8_t* param_memory(Frame& frame, uint64_t address, int bytes, int lane) {
  Memory::check_alignment("param", address, bytes, lane);
  if (address + bytes > static_cast<uint64_t>(frame.function->param_bytes))
    throw Fault(
        "out of bounds: parameter access of " + std::to_string(bytes) + " bytes at byte " + std::to_string(address),
        1u << lane);
  return frame.param(lane) + address;
}

}  // namespace

uint8_t* global_memory(Block& block, int actor, uint64_t address, int bytes, Access access, int lane) {
  uint8_t* at = block.launch->memory.at(address, bytes, !reads_only(access), lane);
  if (!block.shared.checks_races()) return at;
  GlobalShadow& shadow = block.launch->shadow;
  switch (access) {
    case Access::read:
      shadow.read(block, actor, lane, address, bytes, false);
      break;
    case Access::write:
      shadow.write(block, actor, lane, address, bytes, false);
      break;
    case Access::strong_read:
      block.order.acquire(actor, address, bytes);
      block.clocks.meet(actor, 1u << lane);
      shadow.read(block, actor, lane, address, bytes, true);
      break;
    case Access::strong_write:  // what it publishes must be there before the value is
      shadow.write(block, actor, lane, address, bytes, true);
      block.order.release(actor, address, bytes, false);
      break;
    case Access::atomic:  // what it publishes depends on whether it writes: atomic.cpp
      block.order.acquire(actor, address, bytes);
      block.clocks.meet(actor, 1u << lane);
      shadow.write(block, actor, lane, address, bytes, true);
  }
  return at;
}

void count_runs(Counters& counters, Run* runs, size_t count, Access access) {
  auto before = [](const Run& x, const Run& y) { return x.address < y.address; };
  if (!std::is_sorted(runs, runs + count, before)) std::sort(runs, runs + count, before);
  uint64_t next_sector = 0, end = 0, bytes = 0, used = 0, distinct = 0;
  for (const Run* run = runs; run != runs + count; ++run) {
    const uint64_t first = run->address, last = first + run->bytes;
    const uint64_t sector = std::max(first / 32, next_sector), sectors_end = (last - 1) / 32 + 1;
    if (sectors_end > sector) used += sectors_end - sector;
    next_sector = std::max(next_sector, sectors_end);
    bytes += run->bytes;
    if (last > end) distinct += last - std::max(first, end);
    end = std::max(end, last);
  }
  const bool reads = reads_only(access);
  (reads ? counters.global_read_bytes : counters.global_write_bytes) += bytes;
  (reads ? counters.global_read_sectors : counters.global_write_sectors) += used;
  (reads ? counters.global_read_ideal : counters.global_write_ideal) += (distinct + 31) / 32;
}

uint8_t* access_memory(Warp& w, Space space, uint64_t address, int bytes, Access access, int lane, Traffic* traffic) {
  if (space == Space::generic) {
    switch (address >> kSpaceShift) {
      case 1:
        space = Space::shared;
        break;
      case 2:
        space = Space::local;
        break;
      case 3:
        return param_memory(*w.entry, address - kParamWindow, bytes, lane);
      default:
        space = Space::global;
    }
  }
  switch (space) {
    case Space::shared: {
      const auto offset = static_cast<uint32_t>(address);
      Memory::check_alignment("shared", offset, bytes, lane);
      if (traffic) traffic->add_shared(offset, bytes, lane);
      SharedMemory& shared = w.block->shared;
      switch (access) {
        case Access::read:
          return shared.read(w.index, offset, bytes, lane);
        case Access::write:
          return shared.write(w.index, offset, bytes, lane);
        case Access::strong_read:
          return shared.strong_read(w.index, offset, bytes, lane);
        case Access::strong_write:
          return shared.strong_write(w.index, offset, bytes, lane);
        case Access::atomic:
          return shared.atomic(w.index, offset, bytes, lane);
      }
      return nullptr;
    }
    case Space::local:
      return local_memory(w, address & (kLocalWindow - 1), bytes, access, lane);
    case Space::param:
      return param_memory(*w.frame, address, bytes, lane);
    default:
      Memory::check_alignment("global", address, bytes, lane);
      if (traffic) traffic->add_global(address, bytes);
      return global_memory(*w.block, w.index, address, bytes, access, lane);
  }
}

int bank_transactions(const uint32_t* address, int count, int bytes) {
  uint32_t words[32][32];
  int used[32] = {}, most = 0;
  for (int i = 0; i < count; ++i)
    for (uint32_t word = address[i] / 4; word <= (address[i] + bytes - 1) / 4; ++word) {
      uint32_t* bank = words[word % 32];
      int& n = used[word % 32];
      if (std::find(bank, bank + n, word) == bank + n) bank[n++] = word;
      most = std::max(most, n);
    }
  return most;
}

void StoreCheck::conflict(int first, int second) {
  throw Fault("data race: lanes " + std::to_string(first) + " and " + std::to_string(second) +
                  " of a warp store different values to the same address in one instruction",
              1u << first | 1u << second);
}

void Traffic::finish(Warp& w, const Instruction& in, Access access) {
  if ((access == Access::write || access == Access::strong_write) && (globals || shareds)) w.block->changed();
  Counters& counters = *w.block->counters;
  if (globals) count_runs(counters, global, globals, access);
  if (!shareds) return;
  const int bytes = shared[0].bytes, lanes_per_phase = bytes <= 4 ? 32 : 128 / bytes;
  uint32_t phase[32];
  for (int first = 0; first < 32; first += lanes_per_phase) {
    int n = 0;
    for (int i = 0; i < shareds; ++i)
      if (shared_lane[i] / lanes_per_phase == first / lanes_per_phase)
        phase[n++] = static_cast<uint32_t>(shared[i].address);
    if (!n) continue;
    counters.shared_transactions[in.id] += bank_transactions(phase, n, bytes);
    ++counters.shared_ideal[in.id];
  }
}

}  // namespace emulator
