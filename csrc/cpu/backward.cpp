// The backward kernel: scores are computed again from the inputs and lse, once for every pair of tiles.
//
// Per tile of queries (lanes m) and keys (n), all in A, with c = scale * log2(e):
//   P[n][m]   = 2^(c * sum_d K[n][d] * Qt[d][m] - log2(e) * lse[m])
//   dS[n][m]  = P[n][m] * (sum_d V[n][d] * dOt[d][m] - delta[m]) * scale
//   dV[n][d] += sum_m P[n][m] * dO[m][d]
//   dK[n][d] += sum_m dS[n][m] * Q[m][d]
//   dQt[d][m] += sum_n K[n][d] * dS[n][m]
//
// The chunks of keys of a head are dealt out to a few tasks, which own the gradients of their keys, loop over the query
// heads of the group and their tiles, and add up a dQ of their own; those are added in their order afterwards. To bound
// the memory of these, a round takes some query tiles, of as many heads as fit. How the work of a head is cut depends
// on its lengths alone, and the order inside a task is fixed, so the bits depend neither on the threads nor on other
// heads.
//
// Masked pairs have P = dS = 0; where the other factor is not finite the sums skip them, because 0 * NaN would leak.
#include "cpu/backward.h"

#include <optional>
#include <vector>

#include "cpu/query_tile.h"

namespace ringattn::cpu {
namespace {

constexpr std::int32_t kChunkKeys = 256;
constexpr std::int64_t kDealers = 8;
constexpr std::int64_t kRoundTiles = 16;
constexpr std::int64_t kPartBytes = 64 * 1024 * 1024;  // of all parts of dQ in a round

// Calls body(first, count, pairs) with the keys of a tile that queries may see, if there are any.
template <typename Function>
void with_visible_keys(const Tile& queries, const Segment& keys, const Mask& mask, const Function& body) {
  const Visibility visibility = ringattn::visibility(queries.segment, keys, mask);
  if (visibility == Visibility::skip) return;
  if (visibility == Visibility::full) return body(0, keys.length, nullptr);
  const VisiblePairs pairs(queries.segment, keys, mask);
  body(pairs.first_key, pairs.end_key - pairs.first_key, &pairs);
}

// target row += source row, for `count` rows of a gradient.
template <typename A>
void add_rows(const A* source, std::int64_t source_stride, RowSpan<A> target, std::int64_t count, std::int64_t D) {
  for (std::int64_t i = 0; i < count; ++i) {
    A* to = target.row(i);
    const A* from = source + i * source_stride;
    for (std::int64_t d = 0; d < D; ++d) to[d] += from[d];
  }
}

// How the work of a block is cut: a round takes some key heads, all their chunks, and some query tiles.
template <typename A>
struct Plan {
  std::vector<Tile> query_tiles, chunks;
  std::int64_t heads;          // key heads of all batches: B * Hkv
  std::int64_t group;          // query heads of a key head
  std::int64_t dealers;        // tasks among which the chunks of a head are dealt out, in turn
  std::int64_t tile_elements;  // of a part of dQ
  std::int64_t round_heads, round_tiles;
  A* parts = nullptr;                 // of dQ, [D][kLanes] for each query tile, query head and dealer of a round
  std::vector<std::uint8_t> touched;  // whether a part has been written in this round

  explicit Plan(const BlockArgs& args)
      : query_tiles(make_tiles(args.query_segments, kLanes)),
        chunks(make_tiles(args.key_segments, kChunkKeys)),
        heads(args.B * args.Hkv),
        group(args.Hq / args.Hkv),
        dealers(std::max<std::int64_t>(static_cast<std::int64_t>(chunks.size()), 1)),
        tile_elements(padded(args.D) * kLanes),
        round_heads(heads),
        round_tiles(std::min(kRoundTiles, static_cast<std::int64_t>(query_tiles.size()))) {
    if (args.grad_query.data == nullptr) return;
    dealers = std::min(dealers, kDealers);
    const std::int64_t head_parts = group * dealers * round_tiles;
    const std::int64_t head_bytes = head_parts * tile_elements * static_cast<std::int64_t>(sizeof(A));
    round_heads = std::clamp<std::int64_t>(kPartBytes / std::max<std::int64_t>(head_bytes, 1), 1,
                                           std::max<std::int64_t>(heads, 1));
    Scratch& memory = Scratch::of_this_pass();
    memory.reserve(round_heads * head_bytes, 1);
    parts = memory.take<A>(round_heads * head_parts * tile_elements);
    touched.resize(static_cast<std::size_t>(round_heads * head_parts));
  }

  // The number of a part: head, query head of its group, dealer and query tile, each counted within the round.
  std::int64_t part(std::int64_t head, std::int64_t of_group, std::int64_t dealer, std::int64_t tile) const {
    return ((head * group + of_group) * dealers + dealer) * round_tiles + tile;
  }
  A* data(std::int64_t part) const { return parts + part * tile_elements; }
};

// What a task works on.
struct Round {
  std::int64_t first_head;            // the round's
  std::int64_t first_tile, end_tile;  // of queries
};

// Calls body(first, count, pairs) with what products of pairs leave out of a tile: first the special keys, then, one by
// one, the special queries with the other keys. Keys are counted from `offset` on; `pairs` is null if all pairs are
// visible.
template <typename Function>
void add_special(const std::vector<std::int32_t>& special_keys, const std::vector<std::int32_t>& special_queries,
                 std::int32_t offset, std::int32_t keys, std::int32_t queries, const VisiblePairs* pairs,
                 const Function& body) {
  bool is_special[kTileKeys] = {};
  for (const std::int32_t n : special_keys) {
    if (n >= offset && n < offset + keys) is_special[n - offset] = true;
  }
  const auto first_of = [&](std::int32_t n) { return pairs ? pairs->begin[n] : 0; };
  const auto end_of = [&](std::int32_t n) { return pairs ? pairs->end[n] : queries; };
  const auto call = [&](const VisiblePairs& shown) {
    if (shown.first_key < shown.end_key) body(shown.first_key, shown.end_key - shown.first_key, &shown);
  };
  VisiblePairs of_keys;
  for (std::int32_t n = 0; n < keys; ++n) {
    if (is_special[n]) of_keys.show(n, first_of(n), end_of(n));
  }
  call(of_keys);
  for (const std::int32_t m : special_queries) {
    VisiblePairs of_query;
    for (std::int32_t n = 0; n < keys; ++n) {
      if (!is_special[n] && first_of(n) <= m && m < end_of(n)) of_query.show(n, m, m + 1);
    }
    call(of_query);
  }
}

// The chunks of one dealer of a head, which is counted within the round.
template <typename T>
void backward_task(const BlockArgs& args, Plan<Accumulator<T>>& plan, const Round& round, std::int64_t head,
                   std::int64_t dealer) {
  using A = Accumulator<T>;
  const std::int64_t D = padded(args.D);
  const std::int64_t b = (round.first_head + head) / args.Hkv, kv_head = (round.first_head + head) % args.Hkv;
  const bool by_pairs = multiplies_pairs<T>();
  Scratch& scratch = Scratch::of_this_thread();
  scratch.reserve(2 * kChunkKeys * D * static_cast<std::int64_t>(sizeof(A)) + KeyTile<T>::bytes(args, kChunkKeys) +
                      QueryTile<T>::bytes(args) +
                      (by_pairs ? 2 * KeyPairs::elements(args, kChunkKeys) + QueryPairs::bytes(args) : 0),
                  2 + KeyTile<T>::kArrays + QueryTile<T>::kArrays + KeyPairs::kArrays + QueryPairs::kArrays);
  A* grad_key = args.grad_key.data ? scratch.take<A>(kChunkKeys * D) : nullptr;
  A* grad_value = args.grad_value.data ? scratch.take<A>(kChunkKeys * D) : nullptr;
  KeyTile<T> key_rows(args, kChunkKeys, scratch);
  QueryTile<T> query_rows(args, scratch);
  std::optional<KeyPairs> key_pairs;
  std::optional<QueryPairs> query_pairs;
  if (by_pairs) {
    key_pairs.emplace(args, b, kv_head, kChunkKeys, scratch);
    query_pairs.emplace(args, scratch);
  }

  for (std::size_t chunk = static_cast<std::size_t>(dealer); chunk < plan.chunks.size();
       chunk += static_cast<std::size_t>(plan.dealers)) {
    const Tile& keys = plan.chunks[chunk];
    key_rows.move_to(b, kv_head, keys);
    if (by_pairs) key_pairs->move_to(keys);
    bool any = false;
    for (std::int64_t of_group = 0; of_group < plan.group; ++of_group) {
      const std::int64_t h = kv_head * plan.group + of_group;
      for (std::int64_t tile = round.first_tile; tile < round.end_tile; ++tile) {
        const Tile& queries = plan.query_tiles[static_cast<std::size_t>(tile)];
        if (!any_visible(queries.segment, keys.segment, args.mask)) continue;
        if (!any && grad_key) std::fill_n(grad_key, keys.count() * D, A{0});
        if (!any && grad_value) std::fill_n(grad_value, keys.count() * D, A{0});
        any = true;
        GradientTargets<A> targets{grad_key, grad_value, nullptr};
        if (plan.parts != nullptr) {
          const std::int64_t part = plan.part(head, of_group, dealer, tile - round.first_tile);
          targets.query_t = plan.data(part);
          if (!plan.touched[static_cast<std::size_t>(part)]) std::fill_n(targets.query_t, plan.tile_elements, A{0});
          plan.touched[static_cast<std::size_t>(part)] = 1;
        }
        bool paired = false;
        if constexpr (std::is_same_v<T, BFloat16>) {
          paired = by_pairs && key_pairs->is_worth_it() && query_pairs->load(b, h, queries);
        }
        const bool some_special = paired && !(key_pairs->special().empty() && query_pairs->special().empty());
        if (!paired || some_special) query_rows.load(b, h, queries);
        for (std::int32_t offset = 0; offset < keys.count(); offset += kTileKeys) {
          const Segment part = keys.segment.part(offset, std::min(kTileKeys, keys.count() - offset));
          with_visible_keys(
              queries, part, args.mask, [&](std::int32_t from, std::int32_t count, const VisiblePairs* pairs) {
                const auto in_float = [&](std::int32_t first_key, std::int32_t keys_here, const VisiblePairs* shown) {
                  query_rows.add(key_rows, offset + first_key, keys_here, shown, targets);
                };
                if constexpr (std::is_same_v<T, BFloat16>) {
                  if (paired) {
                    query_pairs->add(*key_pairs, offset, count, pairs, targets);
                    if (some_special) {
                      add_special(key_pairs->special(), query_pairs->special(), offset, part.length, queries.count(),
                                  pairs, in_float);
                    }
                    return;
                  }
                }
                in_float(from, count, pairs);
              });
        }
      }
    }
    if (any && grad_key) {
      add_rows(grad_key, D, rows_at<A>(args.grad_key, b, kv_head, keys.row), keys.count(), args.D);
    }
    if (any && grad_value) {
      add_rows(grad_value, D, rows_at<A>(args.grad_value, b, kv_head, keys.row), keys.count(), args.D);
    }
  }
}

// dQ of a query tile from the parts of all dealers. Head and tile are counted within the round.
template <typename A>
void add_parts(const BlockArgs& args, Plan<A>& plan, const Round& round, std::int64_t head, std::int64_t of_group,
               std::int64_t tile) {
  A* sum = nullptr;
  for (std::int64_t dealer = 0; dealer < plan.dealers; ++dealer) {
    const std::int64_t part = plan.part(head, of_group, dealer, tile);
    if (!plan.touched[static_cast<std::size_t>(part)]) continue;
    plan.touched[static_cast<std::size_t>(part)] = 0;
    const A* more = plan.data(part);
    if (sum == nullptr) {
      sum = plan.data(part);
    } else {
      for (std::int64_t i = 0; i < plan.tile_elements; ++i) sum[i] += more[i];
    }
  }
  if (sum == nullptr) return;
  const std::int64_t D = padded(args.D);
  const std::int64_t b = (round.first_head + head) / args.Hkv, kv_head = (round.first_head + head) % args.Hkv;
  Scratch& scratch = Scratch::of_this_thread();
  scratch.reserve(plan.tile_elements * static_cast<std::int64_t>(sizeof(A)), 1);
  A* rows = scratch.take<A>(plan.tile_elements);
  micro<A>().transpose(sum, kLanes, rows, D, D, kLanes);
  const Tile& queries = plan.query_tiles[static_cast<std::size_t>(round.first_tile + tile)];
  add_rows(rows, D, rows_at<A>(args.grad_query, b, kv_head * plan.group + of_group, queries.row), queries.count(),
           args.D);
}

}  // namespace

template <typename T>
void backward(const BlockArgs& args, const Launch& launch) {
  if (!args.grad_query.data && !args.grad_key.data && !args.grad_value.data) return;
  Plan<Accumulator<T>> plan(args);
  const std::int64_t tiles = static_cast<std::int64_t>(plan.query_tiles.size());
  for (std::int64_t first_head = 0; first_head < plan.heads; first_head += plan.round_heads) {
    const std::int64_t heads = std::min(plan.round_heads, plan.heads - first_head);
    for (std::int64_t first = 0; first < tiles; first += kRoundTiles) {
      const Round round{first_head, first, std::min(first + kRoundTiles, tiles)};
      run_tasks(launch, heads * plan.dealers, [&](std::int64_t task) {
        backward_task<T>(args, plan, round, task / plan.dealers, task % plan.dealers);
      });
      if (!args.grad_query.data) continue;
      const std::int64_t count = round.end_tile - round.first_tile;
      run_tasks(launch, heads * plan.group * count, [&](std::int64_t task) {
        const std::int64_t head = task / count / plan.group, of_group = task / count % plan.group;
        add_parts(args, plan, round, head, of_group, task % count);
      });
    }
  }
  if (plan.parts != nullptr) Scratch::of_this_pass().keep_at_most(kPartBytes);
}

template void backward<double>(const BlockArgs&, const Launch&);
template void backward<float>(const BlockArgs&, const Launch&);
template void backward<BFloat16>(const BlockArgs&, const Launch&);
template void backward<Float16>(const BlockArgs&, const Launch&);

}  // namespace ringattn::cpu
