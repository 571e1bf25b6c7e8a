// Order through global memory, between blocks and between warps of one.
//
// A fence makes ready what its warp has heard of; a strong write or an atomic publishes at its address what its warp
// has heard of and some fence of the block has made ready; a strong read or an atomic of the address hears that, at the
// time of the reader, so that warps of its block know it as soon as they have heard of that time. Within a block no
// fence is asked for. Leniently, an atomic hears also where its result is not used, and a publication is never
// overwritten.
#pragma once

#include <deque>
#include <unordered_map>
#include <unordered_set>

#include "clocks.h"

namespace emulator {

// An access to global memory; block 0: none.
struct Moment {
  uint64_t time : 24, actor : 7, lane : 5;
  uint64_t async : 1;   // by the async proxy
  uint64_t strong : 1;  // an atomic, or a strong write
  uint64_t block : 26;  // its number + 1
};
static_assert(sizeof(Moment) == 8);
constexpr int64_t kMostBlocks = (1 << 26) - 1;

struct Publication;
struct Snapshot {  // what a warp can publish
  int64_t block;
  Clock fenced;                           // of its block's actors
  Clock proxied;                          // of those, what a fence.proxy.async serves
  std::vector<const Publication*> heard;  // from others, since the earlier one
  const Snapshot* earlier;                // of the same warp
};
struct Publication {
  const Snapshot* what;
  const Publication* before;  // at the same address
};

// All of a launch. Strong accesses come one at a time (Launch::atomics); what is published does not change.
class Publications {
 public:
  bool empty() const { return at_.empty(); }
  const Publication* find(uint64_t word) const {
    auto found = at_.find(word);
    return found == at_.end() ? nullptr : found->second;
  }
  void add(uint64_t word, const Snapshot* what) {
    const Publication*& at = at_[word];
    if (at && at->what == what) return;
    at = &publications_.emplace_back(Publication{what, at});
  }
  const Snapshot* keep(Snapshot what) { return &snapshots_.emplace_back(std::move(what)); }

 private:
  std::deque<Snapshot> snapshots_;
  std::deque<Publication> publications_;
  std::unordered_map<uint64_t, const Publication*> at_;  // the newest, by 4-byte word
};

class BlockOrder {
 public:
  void start(Publications& all, Clocks& clocks, int64_t block);
  void fence(int actor, bool beyond_block);  // __threadfence or __threadfence_block
  void fence_proxy(int actor);               // fence.proxy.async of global memory
  // quietly: a relaxed reduction, which says nothing in blocks that know no fences
  void release(int actor, uint64_t address, int bytes, bool quietly);
  void acquire(int actor, uint64_t address, int bytes);
  bool heard(int actor, Moment access);
  bool proxied(int actor, Moment access);  // of a generic write that was heard of

 private:
  struct Heard {
    int actor;
    uint32_t time;
    const Publication* what;
    bool proxied;  // a fence.proxy.async of this block came after it
  };
  struct Known {
    size_t heard;  // index
    const Snapshot* what;
  };
  const Snapshot* snapshot(int actor);
  template <class F>
  bool any_known(int actor, Moment access, F accept);
  void expand();

  Publications* all_ = nullptr;
  Clocks* clocks_ = nullptr;
  int64_t block_ = 0;
  bool fences_ = false;
  Clock fenced_, proxied_;
  std::unordered_map<uint64_t, Clock> own_;  // what this block has published, for its own warps
  std::vector<Heard> heard_;
  std::unordered_map<uint64_t, const Publication*> newest_;  // by word and actor: what it heard there
  std::vector<std::vector<bool>> said_;                      // by actor: which of heard_ its snapshots have
  std::vector<const Snapshot*> last_;                        // by actor
  size_t expanded_ = 0;                                      // of heard_
  std::unordered_map<int64_t, std::vector<Known>> known_;    // by block
  std::vector<std::unordered_set<const void*>> seen_;        // by actor
};

}  // namespace emulator
