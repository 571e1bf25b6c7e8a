// mbarriers of a block, by shared address. Phases count up; a parity test asks whether the phase of that parity is
// over.
#pragma once

#include <map>
#include <string>

#include "shared.h"

namespace emulator {

struct Block;

struct MBarrier {
  int64_t phase = 0;  // completed phases
  int64_t pending = 0, expected = 0, transactions = 0;
  Clock arriving, done, done_before;  // what arrivals of this phase know, what those of the two before it knew
};

MBarrier& find_mbarrier(Block& block, uint32_t address);
void check_mbarrier(Block& block, uint32_t address, MBarrier& barrier);  // completes the phase when nothing is pending
void expect_transactions(MBarrier& barrier, int64_t bytes);
void arrive_mbarrier(Block& block, MBarrier& barrier, int actor, int64_t count);
void complete_transactions(Block& block, uint32_t address, int64_t bytes);  // by the copy engine

}  // namespace emulator
