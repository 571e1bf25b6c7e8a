// Collectives of the lanes that a mask names. Lanes that come together may bring several masks: groups, each on its
// own.
#pragma once

#include "lanes.h"

namespace emulator {

inline uint32_t lanes_with_mask(const Warp& w, const Operand& members, int lane, uint32_t among) {
  const uint32_t* masks = w.in<uint32_t>(members);
  uint32_t same = 0;
  for (int k = lane; k < 32; ++k) same |= (among >> k & 1 && masks[k] == masks[lane] ? 1u : 0) << k;
  return same;
}

// Carries out F for each group; w.mask is its lanes. A group whose lanes are not all here goes on alone, to wait for
// them.
template <const char* kName, class F>
void run_groups(Warp& w, const Instruction& in) {
  const uint32_t all = w.mask;
  for (uint32_t left = all; left;) {
    const int lane = __builtin_ctz(left);
    const uint32_t group = lanes_with_mask(w, in.e, lane, all), members = w.in<uint32_t>(in.e)[lane];
    if (group != all && members & w.exists & ~group) {
      Instruction again;
      again.target = w.next = w.pc;
      return w.jump(group, again);
    }
    left &= ~group;
  }
  for (uint32_t left = all; left;) {
    const int lane = __builtin_ctz(left);
    w.mask = lanes_with_mask(w, in.e, lane, all);
    left &= ~w.mask;
    if (!w.collect(w.in<uint32_t>(in.e)[lane], kName)) return;
    F{}(w, in);
  }
}

// The mask is operand e. F is a lambda without captures.
template <const char* kName, class F>
void each_group(Decoder& s, F) {
  s.in.execute = run_groups<kName, F>;
}

}  // namespace emulator
