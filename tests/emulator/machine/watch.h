// Launches that never end. Once nothing has changed in memory for a while, warps look at their state every few backward
// jumps: a warp whose registers, local memory and place have all come back, while nobody changed memory, is in a loop
// that it cannot leave. If every warp of the launch is in such a loop or blocked, this is a deadlock. Loops that count
// or read a clock have no such state; Launch::limit ends them.
#pragma once

#include <atomic>
#include <cstdint>

namespace emulator {

constexpr uint64_t kQuiet = 100'000;  // warp instructions without a change before warps look

// Of one host thread; others read it.
struct alignas(64) Progress {
  std::atomic<uint64_t> changes{0};  // of memory, and events of barriers; only its own thread adds
  std::atomic<uint64_t> stuck{0};    // the watch in which all blocks of the thread cannot go on; kFinished
};
constexpr uint64_t kFinished = ~uint64_t{0};

// Brent's way to find a cycle: the state is compared with one kept, which is replaced after 1, 2, 4, ... looks.
struct LoopWatch {
  uint64_t watch = 0;  // Block::watch that this belongs to
  uint64_t kept = 0;   // a hash
  int jumps = 0, looks = 0, replace_after = 1;
  int turns = 0;  // Warp::turns_ when it was kept
  bool looping = false;
};

}  // namespace emulator
