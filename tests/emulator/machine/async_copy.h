// Asynchronous work of one warp: groups of cp.async and of bulk stores, and wgmma in flight; and the copies of a block.
#pragma once

#include <functional>
#include <memory>

#include "machine.h"

namespace emulator {

struct CpAsync {  // one thread's cp.async
  uint32_t to = 0;
  uint64_t from = 0;
  int bytes = 0, read = 0;  // the rest is zero
  bool moved = false;       // its bytes are there; the books still say pending
  bool done = false;
};
using CpGroup = std::vector<std::shared_ptr<CpAsync>>;

void move_bytes(Block& block, CpAsync& copy, int lane);
void complete(Block& block, int actor, CpAsync& copy, int lane);  // what a wait promises

struct BulkGroup {
  std::vector<std::function<void()>> reads;   // read shared memory
  std::vector<std::function<void()>> writes;  // then write global memory
};

// Bits of Warp::register_state.
constexpr uint8_t kAccumulating = 1, kFeeding = 2, kTouched = 4;

struct MatrixGroup {
  std::vector<std::function<void()>> work;     // what is left to do when the group is waited for
  std::vector<std::pair<uint32_t, int>> held;  // shared memory that is read: address, bytes
  std::vector<int32_t> accumulators, inputs;   // register offsets in flight
};

struct AsyncState {
  CpGroup open[32];                // of each lane, not committed
  std::deque<CpGroup> groups[32];  // committed, oldest first
  BulkGroup bulk_open[32];
  std::deque<BulkGroup> bulk_groups[32];
  MatrixGroup matrix_open;
  std::deque<MatrixGroup> matrix_groups;
  int64_t matrix_finished = 0;  // groups that left matrix_groups
  // What accumulators in flight really hold, laid out as the registers, which are poisoned.
  std::vector<uint8_t> accumulators;
};

void finish_bulk(Warp& warp);  // what is left of its stores when the block ends

inline void land_one(Block& block, size_t which) {
  auto land = std::move(block.flights[which].land);
  block.flights.erase(block.flights.begin() + static_cast<long>(which));
  block.happened();
  land();
}

}  // namespace emulator
