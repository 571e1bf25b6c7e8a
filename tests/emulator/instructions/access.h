// One lane's access to memory of any space: bounds, alignment, shadow; and what the counters count of a warp's access.
#pragma once

#include <algorithm>
#include <cstring>

#include "lanes.h"

namespace emulator {

enum class Access : uint8_t { read, write, strong_read, strong_write, atomic };
constexpr bool reads_only(Access access) { return access == Access::read || access == Access::strong_read; }

// Memory order of a load, store or atomic. volatile and mmio count as relaxed, sc as acq_rel; the scope is not told
// apart.
enum class Order : uint8_t { weak, relaxed, acquire, release, acq_rel };
constexpr bool releases(Order order) { return order == Order::release || order == Order::acq_rel; }

// The address of one lane: base + offset; 32-bit bases wrap at 32 bits.
inline uint64_t lane_address(const Warp& w, const Operand& o, int lane) {
  const int64_t add = o.addend + (o.in_frame ? w.frame->local_base : 0);
  if (o.bytes == 4) return static_cast<uint32_t>(w.in<uint32_t>(o)[lane] + add);
  return w.in<uint64_t>(o)[lane] + add;
}

// What one warp instruction touches, for the counters.
struct Run {
  uint64_t address;
  int bytes;
};

// Lanes of one weak store that write to the same bytes must write the same: which of them stays is not defined.
class StoreCheck {
 public:
  // Before the value goes to `to`.
  void add(const uint8_t* to, int lane, const uint8_t* value, int bytes) {
    if (count_ && to <= highest_)
      for (int k = 0; k < count_; ++k)
        if (to_[k] == to && std::memcmp(to, value, bytes) != 0) conflict(lane_[k], lane);
    highest_ = std::max(highest_, to);
    to_[count_] = to;
    lane_[count_++] = lane;
  }

 private:
  [[noreturn]] static void conflict(int first, int second);
  const uint8_t *to_[32], *highest_ = nullptr;
  int lane_[32], count_ = 0;
};

struct Traffic {
  Run global[32], shared[32];
  int globals = 0, shareds = 0;
  uint8_t shared_lane[32];
  void add_global(uint64_t address, int bytes) { global[globals++] = {address, bytes}; }
  void add_shared(uint64_t address, int bytes, int lane) {
    shared_lane[shareds] = static_cast<uint8_t>(lane);
    shared[shareds++] = {address, bytes};
  }
  void finish(Warp& w, const Instruction& in, Access access);  // shared accesses are of equal width
};

// Bytes, 32-byte sectors, and the sectors that the distinct bytes would fill, of one instruction's runs of global
// memory.
void count_runs(Counters& counters, Run* runs, size_t count, Access access);

// The host's bytes behind an address, checked. The space of a generic address is in its top byte.
uint8_t* access_memory(Warp& w, Space space, uint64_t address, int bytes, Access access, int lane, Traffic* traffic);

// The same of a global address.
uint8_t* global_memory(Block& block, int actor, uint64_t address, int bytes, Access access, int lane);

// Shared-memory transactions of one access: lanes' word addresses by bank, in phases of 128 bytes.
int bank_transactions(const uint32_t* address, int count, int bytes);

}  // namespace emulator
