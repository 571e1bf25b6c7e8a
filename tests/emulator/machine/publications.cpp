// See publications.h.
#include "publications.h"

#include <algorithm>

namespace emulator {

void BlockOrder::start(Publications& all, Clocks& clocks, int64_t block) {
  all_ = &all;
  clocks_ = &clocks;
  block_ = block;
  const int actors = clocks.actors();
  fenced_.assign(actors, 0);
  proxied_.assign(actors, 0);
  said_.resize(actors);
  last_.assign(actors, nullptr);
  seen_.resize(actors);
}

void BlockOrder::fence(int actor, bool beyond_block) {
  fences_ = true;
  if (beyond_block) join(fenced_, (*clocks_)[actor]);
  clocks_->tick(actor);
}

void BlockOrder::fence_proxy(int actor) {
  join(proxied_, (*clocks_)[actor]);
  for (Heard& one : heard_) one.proxied |= clocks_->heard(actor, one.actor, one.time);
  clocks_->tick(actor);
}

// The last one of this warp if there is nothing new, null if there is nothing at all.
const Snapshot* BlockOrder::snapshot(int actor) {
  const Clock& clock = (*clocks_)[actor];
  Snapshot made{block_, fenced_, proxied_, {}, last_[actor]};
  for (size_t i = 0; i < clock.size(); ++i) made.fenced[i] = std::min(clock[i], fenced_[i]);
  auto& said = said_[actor];
  said.resize(heard_.size());
  for (size_t i = 0; i < heard_.size(); ++i)
    if (!said[i] && clocks_->heard(actor, heard_[i].actor, heard_[i].time)) {
      said[i] = true;
      made.heard.push_back(heard_[i].what);
    }
  const bool nothing = std::all_of(made.fenced.begin(), made.fenced.end(), [](uint32_t time) { return time == 0; });
  const Snapshot* last = last_[actor];
  if (made.heard.empty() && (last ? last->fenced == made.fenced && last->proxied == made.proxied : nothing))
    return last;
  return last_[actor] = all_->keep(std::move(made));
}

void BlockOrder::release(int actor, uint64_t address, int bytes, bool quietly) {
  if (quietly && !fences_) return;
  const Snapshot* what = fences_ || !heard_.empty() ? snapshot(actor) : nullptr;
  for (uint64_t word = address / 4; word <= (address + bytes - 1) / 4; ++word) {
    if (clocks_->actors() > 2) join(own_[word], (*clocks_)[actor]);
    if (what) all_->add(word, what);
  }
  clocks_->tick(actor);
}

void BlockOrder::acquire(int actor, uint64_t address, int bytes) {
  if (own_.empty() && all_->empty()) return;
  for (uint64_t word = address / 4; word <= (address + bytes - 1) / 4; ++word) {
    if (auto own = own_.find(word); own != own_.end()) join((*clocks_)[actor], own->second);
    const Publication* what = all_->find(word);
    if (!what) continue;
    const Publication*& newest = newest_[word * 64 + static_cast<uint64_t>(actor)];
    if (newest == what) continue;
    newest = what;
    heard_.push_back({actor, clocks_->now(actor), what, false});
  }
}

// Follows what was heard since the last time to all that stands behind it.
void BlockOrder::expand() {
  std::vector<const Publication*> left;
  for (; expanded_ < heard_.size(); ++expanded_) {
    auto& seen = seen_[heard_[expanded_].actor];
    left.push_back(heard_[expanded_].what);
    while (!left.empty()) {
      const Publication* one = left.back();
      left.pop_back();
      if (!one || !seen.insert(one).second) continue;
      left.push_back(one->before);
      known_[one->what->block].push_back({expanded_, one->what});
      for (const Snapshot* said = one->what; said && seen.insert(said).second; said = said->earlier)
        left.insert(left.end(), said->heard.begin(), said->heard.end());
    }
  }
}

// Whether this warp has heard of a publication that holds the access and is acceptable.
template <class F>
bool BlockOrder::any_known(int actor, Moment access, F accept) {
  if (heard_.empty()) return false;
  expand();
  auto found = known_.find(static_cast<int64_t>(access.block) - 1);
  if (found == known_.end()) return false;
  return std::any_of(found->second.rbegin(), found->second.rend(), [&](const Known& one) {
    const Heard& through = heard_[one.heard];
    return one.what->fenced[access.actor] >= access.time && clocks_->heard(actor, through.actor, through.time) &&
           accept(one, through);
  });
}

bool BlockOrder::heard(int actor, Moment access) {
  if (static_cast<int64_t>(access.block) - 1 == block_ &&
      clocks_->heard(actor, static_cast<int>(access.actor), static_cast<uint32_t>(access.time)))
    return true;
  return any_known(actor, access, [](const Known&, const Heard&) { return true; });
}

bool BlockOrder::proxied(int actor, Moment access) {
  if (static_cast<int64_t>(access.block) - 1 == block_ && proxied_[access.actor] >= access.time) return true;
  return any_known(actor, access, [&](const Known& one, const Heard& through) {
    return through.proxied || one.what->proxied[access.actor] >= access.time;
  });
}

}  // namespace emulator
