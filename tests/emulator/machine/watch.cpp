// See watch.h.
#include "watch.h"

#include <algorithm>

#include "machine.h"

namespace emulator {

namespace {

constexpr int kJumpsPerLook = 256;
constexpr int kTurnsOfDivergedLanes = 8192;  // in which Warp::release_parked has had its say

struct Hash {
  uint64_t value = 0x9e3779b97f4a7c15ULL;
  void add(uint64_t word) {
    value = (value ^ word) * 0xff51afd7ed558ccdULL;
    value ^= value >> 32;
  }
  void add(const uint8_t* bytes, size_t count) {
    uint64_t word;
    for (; count >= 8; bytes += 8, count -= 8) {
      std::memcpy(&word, bytes, 8);
      add(word);
    }
    for (; count; ++bytes, --count) add(*bytes);
  }
};

}  // namespace

uint64_t Warp::state_hash() const {
  Hash hash;
  hash.add(static_cast<uint64_t>(next));
  hash.add(current);
  hash.add(carry);
  const Frame* last = nullptr;
  for (const Split& split : splits) {
    for (uint64_t word : {static_cast<uint64_t>(split.pc), uint64_t{split.active}, static_cast<uint64_t>(split.join),
                          uint64_t{split.collecting}, uint64_t{split.members}})
      hash.add(word);
    if (split.frame.get() == last) continue;
    last = split.frame.get();
    for (const Frame* one = last; one; one = one->caller.get()) {
      hash.add(one->registers, static_cast<size_t>(one->function->register_bytes));
      hash.add(one->params.data(), one->params.size());
    }
  }
  for (const Join& join : joins) hash.add(uint64_t{join.expected} << 32 | join.arrived);
  hash.add(local.data(), local.size());
  return hash.value;
}

void Warp::look_for_loop() {
  LoopWatch& mine = loop_;
  if (mine.watch != block->watch) {
    mine = {};
    mine.watch = block->watch;
  }
  if (mine.looping || ++mine.jumps % kJumpsPerLook) return;
  store();
  const uint64_t hash = state_hash();
  if (hash == mine.kept) {
    mine.looping = converged() || turns_ - mine.turns >= kTurnsOfDivergedLanes;
  } else if (++mine.looks == mine.replace_after) {
    mine.kept = hash;
    mine.turns = turns_;
    mine.looks = 0;
    mine.replace_after *= 2;
  }
}

bool Block::stuck() const {
  return watch && std::all_of(warps.begin(), warps.end(), [&](const auto& warp) {
           return warp->wait != Wait::none || (warp->loop_.watch == watch && warp->loop_.looping);
         });
}

}  // namespace emulator
