// The forward kernel: tiles of kLanes queries absorb key tiles, walked upwards.
//
// Per tile of queries (lanes m) and keys (n), all in A, with c = scale * log2(e):
//   S[n][m]  = sum_d K[n][d] * Qt[d][m]
//   m'[m]    = max(m[m], max_n S[n][m])
//   P[n][m]  = 2^(c * (S[n][m] - m'[m]))
//   l[m]     = l[m] * 2^(c * (m[m] - m'[m])) + sum_n P[n][m]
//   Ot[d][m] = Ot[d][m] * 2^(c * (m[m] - m'[m])) + sum_n V[n][d] * round(P[n][m])
//
// A tile's contribution depends on that tile alone, and the state between tiles is what is stored: a pass cut into
// calls on tile boundaries gives the bits of one call. A query that sees no key of a tile is left as it was, and
// nothing is ever multiplied by a masked score: 0 * NaN would leak. Calls with few queries have a kernel of their own.
#include "cpu/forward.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "cpu/few_rows.h"
#include "cpu/forward_tile.h"

namespace ringattn::cpu {
namespace {

constexpr std::int64_t kReadyBytes = 32 * 1024 * 1024;  // of keys made ready at a time, but at least those of a head

// The keys and values of some heads, converted or packed once for all query tiles of all heads of their groups.
template <typename T>
class KeyBlock {
 public:
  KeyBlock(const BlockArgs& args, const std::vector<Tile>& tiles) : args_(args), tiles_(tiles) {
    by_pairs_ = forward_multiplies_pairs<T>(args);
    const std::int64_t tile_bytes = by_pairs_ ? PackedKeys::elements(args) * 2 : KeyTile<T>::bytes(args, kTileKeys);
    const std::int64_t heads = args.B * args.Hkv, head_bytes = tile_bytes * count();
    max_heads_ = std::clamp<std::int64_t>(kReadyBytes / std::max<std::int64_t>(head_bytes, 1), 1, heads);
    Scratch& memory = Scratch::of_this_pass();
    memory.reserve(max_heads_ * head_bytes, static_cast<int>(max_heads_ * count() * KeyTile<T>::kArrays));
    for (std::int64_t i = 0; i < max_heads_ * count(); ++i) {
      if (by_pairs_) {
        packed_.emplace_back(args, memory);
      } else {
        rows_.emplace_back(args, kTileKeys, memory);
      }
    }
  }

  std::int64_t max_heads() const { return max_heads_; }

  void make_ready(std::int64_t first_head, std::int64_t heads, const Launch& launch) {
    run_tasks(launch, heads * count(), [&](std::int64_t task) {
      const std::int64_t head = first_head + task / count();
      const Tile& tile = tiles_[static_cast<std::size_t>(task % count())];
      bool is_seen = false;
      for (const Segment& queries : args_.query_segments) is_seen |= any_visible(queries, tile.segment, args_.mask);
      if (!is_seen) return;
      if (!by_pairs_) {
        KeyTile<T>& rows = rows_[static_cast<std::size_t>(task)];
        rows.move_to(head / args_.Hkv, head % args_.Hkv, tile);
        rows.make_ready();
        return;
      }
      Scratch& scratch = Scratch::of_this_thread();
      scratch.reserve(PairRows::elements(kTileKeys, args_.D) * 2, 1);
      PairRows value_rows(kTileKeys, args_.D, scratch);
      packed_[static_cast<std::size_t>(task)].pack(head / args_.Hkv, head % args_.Hkv, tile, value_rows);
    });
  }

  // Of a head counted from the first that is ready. `rows` are used where the block has none.
  ReadyKeys<T> at(std::int64_t head, std::size_t tile, KeyTile<T>& rows) {
    const std::size_t index = static_cast<std::size_t>(head * count()) + tile;
    return by_pairs_ ? ReadyKeys<T>{&rows, &packed_[index]} : ReadyKeys<T>{&rows_[index], nullptr};
  }

 private:
  std::int64_t count() const { return static_cast<std::int64_t>(tiles_.size()); }

  const BlockArgs& args_;
  const std::vector<Tile>& tiles_;
  bool by_pairs_;
  std::int64_t max_heads_;
  std::vector<PackedKeys> packed_;
  std::vector<KeyTile<T>> rows_;
};

// The query tiles of a head, longest first: what a tile costs is how many pairs it sees. Tasks go head by head, so that
// keys stay in the caches, and the last ones are the shortest all the same.
std::vector<Tile> sorted_tiles(const BlockArgs& args, std::vector<std::int64_t>& costs) {
  const std::vector<Tile> tiles = make_tiles(args.query_segments, kLanes);
  std::vector<std::int64_t> cost(tiles.size());
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    cost[i] = visible_pairs({{tiles[i].segment}, 1}, args.key_segments, args.mask);
  }
  std::vector<std::size_t> order(tiles.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return cost[a] > cost[b]; });
  std::vector<Tile> sorted;
  for (const std::size_t i : order) {
    sorted.push_back(tiles[i]);
    costs.push_back(cost[i]);
  }
  return sorted;
}

// The query tiles of a head that a task takes absorb the keys together. Keys are made ready here where `block` is null.
template <typename T>
void forward_tiles(const BlockArgs& args, std::int64_t b, std::int64_t h, const Tile* first, const Tile* end,
                   const std::vector<Tile>& key_tiles, KeyBlock<T>* block, std::int64_t head_of_block) {
  const bool by_pairs = forward_multiplies_pairs<T>(args);
  Scratch& scratch = Scratch::of_this_thread();
  const std::int64_t pair_rows = PairRows::elements(std::max<std::int64_t>(kLanes, kTileKeys), args.D);
  scratch.reserve(KeyTile<T>::bytes(args, kTileKeys) + ForwardWork<T>::bytes(args) +
                      (end - first) * ForwardTile<T>::bytes(args) + 2 * (PackedKeys::elements(args) + pair_rows),
                  KeyTile<T>::kArrays + ForwardWork<T>::kArrays + PackedKeys::kArrays + 1 +
                      static_cast<int>(end - first) * ForwardTile<T>::kArrays);
  const std::int64_t kv_head = h / (args.Hq / args.Hkv);
  KeyTile<T> rows(args, kTileKeys, scratch);
  const ForwardWork<T> work(args, scratch);
  std::optional<PairRows> unpacked;
  std::optional<PackedKeys> packed;
  if (by_pairs) unpacked.emplace(std::max<std::int64_t>(kLanes, kTileKeys), args.D, scratch);
  if (by_pairs && block == nullptr) packed.emplace(args, scratch);
  std::vector<ForwardTile<T>> tiles;
  tiles.reserve(static_cast<std::size_t>(end - first));
  for (const Tile* queries = first; queries < end; ++queries) {
    tiles.emplace_back(args, b, h, *queries, work, scratch);
    tiles.back().load_state();
    if (by_pairs) tiles.back().load_query_pairs(*unpacked);
  }
  for (std::size_t i = 0; i < key_tiles.size(); ++i) {
    std::optional<ReadyKeys<T>> ready;
    for (ForwardTile<T>& tile : tiles) {
      const Visibility visibility = ringattn::visibility(tile.queries().segment, key_tiles[i].segment, args.mask);
      if (visibility == Visibility::skip) continue;
      if (!ready) {
        rows.move_to(b, kv_head, key_tiles[i]);
        if (packed) packed->pack(b, kv_head, key_tiles[i], *unpacked);
        ready = block ? block->at(head_of_block, i, rows) : ReadyKeys<T>{&rows, packed ? &*packed : nullptr};
      }
      tile.absorb(key_tiles[i], visibility, *ready);
    }
  }
  for (ForwardTile<T>& tile : tiles) tile.store();
}

}  // namespace

template <typename T>
void forward(const BlockArgs& args, const Launch& launch) {
  if (args.B * args.Hq * args.Sq == 0) return;
  if (has_few_rows(args)) return forward_few_rows<T>(args, launch);
  std::vector<std::int64_t> costs;
  std::vector<Tile> query_tiles = sorted_tiles(args, costs);
  if (!args.finalize && (args.load_state || !args.store_state)) {  // what sees nothing stays as it is
    while (!costs.empty() && costs.back() == 0) costs.pop_back(), query_tiles.pop_back();
  }
  const std::vector<Tile> key_tiles = make_tiles(args.key_segments, kTileKeys);
  const TileGroups groups(query_tiles, args.B * args.Hq);
  const std::int64_t group = args.Hq / args.Hkv, heads = args.B * args.Hkv, per_head = group * groups.per_head;
  std::optional<KeyBlock<T>> block;
  const bool in_place = !forward_multiplies_pairs<T>(args) && KeyTile<T>::is_in_place(args);
  if (per_head > 1 && !costs.empty() && costs.front() > 0 && !in_place) block.emplace(args, key_tiles);
  const std::int64_t round_heads = block ? block->max_heads() : heads;
  for (std::int64_t first = 0; first < heads; first += round_heads) {
    const std::int64_t count = std::min(round_heads, heads - first);
    if (block) block->make_ready(first, count, launch);
    run_tasks(launch, count * per_head, [&](std::int64_t task) {
      const std::int64_t head = task / per_head,
                         query_head = (first + head) * group + task % per_head / groups.per_head;
      const std::int64_t tiles = task % groups.per_head;
      forward_tiles<T>(args, query_head / args.Hq, query_head % args.Hq, groups.begin(tiles), groups.end(tiles),
                       key_tiles, block ? &*block : nullptr, head);
    });
  }
  if (block) Scratch::of_this_pass().keep_at_most(kReadyBytes);
}

template void forward<double>(const BlockArgs&, const Launch&);
template void forward<float>(const BlockArgs&, const Launch&);
template void forward<BFloat16>(const BlockArgs&, const Launch&);
template void forward<Float16>(const BlockArgs&, const Launch&);

}  // namespace ringattn::cpu
