// Vector clocks of the actors of a block (FastTrack): its warps and, last, the engine that copies for them. An access
// is ordered behind an earlier one if its actor has heard of the earlier one's time. Time passes at every release.
//
// Lanes of one warp share its clock. Among them an access is ordered behind a write if the accessing lane has met other
// lanes (__syncwarp, a warp collective, a barrier) since the write.
#pragma once

#include <cstdint>
#include <vector>

#include "../ptx/syntax.h"

namespace emulator {

using Clock = std::vector<uint32_t>;  // what an actor has heard of each actor

inline void join(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i)
    if (from[i] > into[i]) into[i] = from[i];
}

inline bool covers(const Clock& clock, const Clock& other) {
  for (size_t i = 0; i < other.size(); ++i)
    if (clock[i] < other[i]) return false;
  return true;
}

class Clocks {
 public:
  void reset(int actors) {
    clocks_.assign(actors, Clock(actors, 0));
    for (int i = 0; i < actors; ++i) clocks_[i][i] = 1;
    wrote_.assign(actors, false);
    met_.assign(static_cast<size_t>(actors) * 32, 0);
  }
  int actors() const { return static_cast<int>(clocks_.size()); }
  Clock& operator[](int actor) { return clocks_[actor]; }
  const Clock& operator[](int actor) const { return clocks_[actor]; }
  uint32_t now(int actor) const { return clocks_[actor][actor]; }
  void tick(int actor) {
    if (++clocks_[actor][actor] >> 24) throw Fault("too many releases for the race detector; use check_races=False");
  }
  bool heard(int actor, int other, uint32_t time) const { return actor == other || clocks_[actor][other] >= time; }

  void wrote(int actor) { wrote_[actor] = true; }
  void meet(int actor, uint32_t lanes) {
    if (wrote_[actor]) {  // only then is there something that must lie in the past
      tick(actor);
      wrote_[actor] = false;
    }
    uint32_t* met = met_.data() + actor * 32;
    for (int lane = 0; lane < 32; ++lane) met[lane] = lanes >> lane & 1 ? now(actor) : met[lane];
  }
  bool met_since(int actor, int lane, uint32_t time) const { return met_[actor * 32 + lane] > time; }

 private:
  std::vector<Clock> clocks_;
  std::vector<uint8_t> wrote_;  // since the clock's last tick for a meeting
  std::vector<uint32_t> met_;   // by actor and lane: the time of the last meeting
};

}  // namespace emulator
