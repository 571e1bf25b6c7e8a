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
// nothing is ever multiplied by a masked score: 0 * NaN would leak.
#include "cpu/forward.h"

#include "cpu/key_pairs.h"
#include "cpu/key_tile.h"
#include "cpu/products.h"
#include "cpu/scratch.h"
#include "cpu/state.h"
#include "cpu/tiles.h"

#include <optional>

namespace ringattn::cpu {
namespace {

// The state of one tile of queries, transposed: a lane per query. Lanes beyond the tile's end hold Q = 0.
template <typename T>
class ForwardTile {
  using A = Accumulator<T>;

 public:
  static constexpr int kArrays = 13;
  static std::int64_t elements(const BlockArgs& args) {
    const std::int64_t pairs = multiplies_pairs<T>() ? (2 * kLanes * padded(args.D) + kTileKeys * kLanes) / 2 : 0;
    return 3 * kLanes * padded(args.D) + kTileKeys * kLanes + 6 * kLanes + pairs;
  }

  ForwardTile(const BlockArgs& args, std::int64_t b, std::int64_t h, const Tile& queries, Scratch& scratch)
      : args_(args), b_(b), h_(h), queries_(queries), row_(state_row(args, b, h) + queries.row), D_(padded(args.D)) {
    rows_ = scratch.take<A>(kLanes * D_);
    query_ = scratch.take<A>(D_ * kLanes);
    o_ = scratch.take<A>(D_ * kLanes);
    scores_ = scratch.take<A>(kTileKeys * kLanes);
    m_ = scratch.take<A>(kLanes);
    m_new_ = scratch.take<A>(kLanes);
    l_ = scratch.take<A>(kLanes);
    sum_ = scratch.take<A>(kLanes);
    factor_ = scratch.take<A>(kLanes);
    visible_ = scratch.take<A>(kLanes);
    if (!multiplies_pairs<T>()) return;
    query_pairs_ = scratch.take<std::uint16_t>(kLanes * D_);
    p_pairs_ = scratch.take<std::uint16_t>(kTileKeys * kLanes);
  }

  void load_query(Scratch& scratch) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (multiplies_pairs<T>() && load_query_pairs(scratch)) return;
    }
    load_query_rows();
  }

  void load_state() {
    std::fill_n(m_, kLanes, kMinusInfinity<A>);
    std::fill_n(l_, kLanes, A{0});
    if (!args_.load_state) {
      std::fill_n(o_, D_ * kLanes, A{0});
      return;
    }
    std::copy_n(static_cast<const A*>(args_.m) + row_, queries_.count(), m_);
    std::copy_n(static_cast<const A*>(args_.l) + row_, queries_.count(), l_);
    copy_rows<A>({static_cast<const A*>(args_.o) + row_ * args_.D, args_.D}, queries_.count(), args_.D, rows_);
    transpose_rows(o_);
  }

  // packed: null if there are no products of pairs.
  void absorb(const Tile& keys, KeyTile<T>& rows, KeyPairs* packed) {
    const Visibility visibility = ringattn::visibility(queries_.segment, keys.segment, args_.mask);
    if (visibility == Visibility::skip) return;
    std::optional<VisiblePairs> pairs;
    if (visibility == Visibility::partial) pairs.emplace(queries_.segment, keys.segment, args_.mask);
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (query_is_paired_ && packed != nullptr && packed->is_worth_it()) {
        return absorb_pairs(*packed, keys.count(), pairs ? &*pairs : nullptr);
      }
    }
    if (pairs) {
      absorb(rows, pairs->first_key, pairs->end_key, &*pairs);
    } else {
      absorb(rows, 0, keys.count(), nullptr);
    }
  }

  // Writes what the call asks for: the state, or the result, or both.
  void store() {
    micro<A>().transpose(o_, kLanes, rows_, D_, D_, kLanes);
    for (std::int64_t i = 0; i < queries_.count(); ++i) {
      A* o = rows_ + i * D_;
      if (args_.store_state) std::copy_n(o, args_.D, static_cast<A*>(args_.o) + (row_ + i) * args_.D);
      if (!args_.finalize) continue;
      finish_row<T>(o, m_[i], l_[i], args_.scale, args_.D, rows_at<T>(args_.out, b_, h_, queries_.row + i).data,
                    static_cast<A*>(args_.lse) + row_ + i);
    }
    if (!args_.store_state) return;
    std::copy_n(m_, queries_.count(), static_cast<A*>(args_.m) + row_);
    std::copy_n(l_, queries_.count(), static_cast<A*>(args_.l) + row_);
  }

 private:
  void load_query_rows() {
    copy_rows<T>(rows_at<const T>(args_.query, b_, h_, queries_.row), queries_.count(), args_.D, rows_);
    transpose_rows(query_);
    has_query_rows_ = true;
  }

  // query_pairs[d/2][m][2] = Q[m][d]: a transposition of pairs, which are as large as floats. Returns whether products
  // of pairs are worth it.
  bool load_query_pairs(Scratch& scratch) {
    PairRows rows(kLanes, args_.D, scratch);
    rows.copy(rows_at<const T>(args_.query, b_, h_, queries_.row), queries_.count());
    odd_queries_ = rows.odd();
    std::fill(rows.row(queries_.count()), rows.row(kLanes), std::uint16_t{0});
    micro<float>().transpose(reinterpret_cast<const float*>(rows.row(0)), D_ / 2,
                             reinterpret_cast<float*>(query_pairs_), kLanes, kLanes, D_ / 2);
    return query_is_paired_ = are_few(odd_queries_, queries_.count());
  }

  // The scores of odd keys and odd queries, for keys [first, end).
  void score_odd(const KeyPairs& keys, std::int64_t first, std::int64_t end, std::int64_t count) {
    const RowSpan<const T> query = rows_at<const T>(args_.query, b_, h_, queries_.row);
    const auto score = [&](std::int64_t n, std::int64_t m) {
      const BFloat16 *k = keys.whole_key(n), *q = query.row(m);
      float sum = 0;
      for (std::int64_t d = 0; d < args_.D; ++d) sum += to_float(k[d]) * to_float(q[d]);
      scores_[(n - first) * kLanes + m] = sum;
    };
    for (const std::int32_t n : keys.odd()) {
      if (n < first || n >= end) continue;
      for (std::int64_t m = 0; m < queries_.count(); ++m) score(n, m);
    }
    for (const std::int32_t m : odd_queries_) {
      for (std::int64_t n = first; n < std::min(end, count); ++n) score(n, m);
    }
  }

  // What the values of odd keys add to o.
  void add_odd(const KeyPairs& keys, std::int64_t first, std::int64_t end, const VisiblePairs* pairs) {
    for (const std::int32_t n : keys.odd()) {
      if (n < first || n >= end) continue;
      const std::int64_t from = pairs ? pairs->begin[n] : 0, to = pairs ? pairs->end[n] : queries_.count();
      const std::uint16_t* p = p_pairs_ + (n - first) / 2 * 2 * kLanes + (n - first) % 2;
      for (std::int64_t d = 0; d < args_.D; ++d) {
        const float value = to_float(keys.whole_value(n)[d]);
        for (std::int64_t m = from; m < to; ++m) o_[d * kLanes + m] += value * to_float({p[2 * m]});
      }
    }
  }

  // absorb() with products of pairs. `pairs` is null if all pairs of the `count` keys are visible.
  void absorb_pairs(KeyPairs& keys, std::int64_t count, const VisiblePairs* pairs) {
    const Pairs& kernels = pair_kernels();
    const std::int64_t first = pairs ? pairs->even_first() : 0, end = pairs ? pairs->even_end() : even(count);
    kernels.multiply({.c = scores_,
                      .c_stride = kLanes,
                      .a = keys.key(first),
                      .a_row_stride = D_,
                      .a_depth_stride = 2,
                      .b = query_pairs_,
                      .b_stride = 2 * kLanes,
                      .rows = end - first,
                      .depth = even(args_.D) / 2,
                      .columns = kLanes,
                      .accumulate = false});
    if (!keys.odd().empty() || !odd_queries_.empty()) score_odd(keys, first, end, count);
    if (pairs) {
      pairs->fill_invisible_even(scores_, kMinusInfinity<float>);
    } else if (end > count) {
      std::fill_n(scores_ + count * kLanes, kLanes, kMinusInfinity<float>);
    }
    const float c = static_cast<float>(args_.scale * kLog2E);
    std::copy_n(m_, kLanes, m_new_);
    kernels.column_max(scores_, end - first, m_new_);
    kernels.exponentials(scores_, end - first, m_new_, c, sum_, p_pairs_);
    if (pairs) {
      pairs->clear_invisible_pairs(p_pairs_);
      std::copy_n(pairs->sees, kLanes, visible_);
    }
    move_to_new_maximum(c, pairs != nullptr);
    kernels.multiply({.c = o_,
                      .c_stride = kLanes,
                      .a = keys.value_pairs(first),
                      .a_row_stride = 2,
                      .a_depth_stride = 2 * D_,
                      .b = p_pairs_,
                      .b_stride = 2 * kLanes,
                      .rows = args_.D,
                      .depth = (end - first) / 2,
                      .columns = kLanes,
                      .accumulate = true});
    if (!keys.odd().empty()) add_odd(keys, first, end, pairs);
  }

  // From m to m_new: l takes sum_ in, o is scaled. Lanes that are not visible_ stay, if there are any.
  void move_to_new_maximum(A c, bool some_invisible) {
    const Micro<A>& kernels = micro<A>();
    if (kernels.advance(m_, m_new_, c, some_invisible ? visible_ : nullptr, sum_, l_, factor_)) {
      kernels.scale_columns(o_, args_.D, factor_);
    }
    std::swap(m_, m_new_);
  }

  // Absorbs the keys [first, end) of a tile; the others are seen by no query of this one. `pairs` is null if all pairs
  // are visible.
  void absorb(KeyTile<T>& rows, std::int32_t first, std::int32_t end, const VisiblePairs* pairs) {
    if (!has_query_rows_) load_query_rows();
    const Micro<A>& kernels = micro<A>();
    const std::int64_t count = end - first;
    multiply_rows(scores_, rows.key(first), query_, count, args_.D);
    if (pairs) pairs->fill_invisible(scores_, kMinusInfinity<A>);
    std::copy_n(m_, kLanes, m_new_);
    kernels.column_max(scores_, count, m_new_);
    const A c = static_cast<A>(args_.scale * kLog2E);
    kernels.exponentials(scores_, count, m_new_, c, sum_, kRounding<T>);
    if (pairs) {
      pairs->fill_invisible(scores_, A{0});
      std::copy_n(pairs->sees, kLanes, visible_);
    }
    move_to_new_maximum(c, pairs != nullptr);
    add_over_keys(o_, rows.value(first), scores_, count, args_.D, pairs);
  }

  // The rows of the tile, and zeros beyond its end, as columns.
  void transpose_rows(A* target) {
    std::fill(rows_ + queries_.count() * D_, rows_ + kLanes * D_, A{0});
    micro<A>().transpose(rows_, D_, target, kLanes, kLanes, D_);
  }

  const BlockArgs& args_;
  const std::int64_t b_, h_;
  const Tile queries_;
  const std::int64_t row_;  // of the tile's first query among all rows of m
  const std::int64_t D_;    // padded
  A *rows_ /*[kLanes][D]*/, *query_ /*[D][kLanes]*/, *o_ /*[D][kLanes]*/, *scores_ /*[kTileKeys][kLanes]*/;
  A *m_, *m_new_, *l_, *sum_, *factor_, *visible_ /*[kLanes] each*/;
  std::uint16_t *query_pairs_ = nullptr /*[D/2][kLanes][2]*/, *p_pairs_ = nullptr /*[kTileKeys/2][kLanes][2]*/;
  std::vector<std::int32_t> odd_queries_;
  bool has_query_rows_ = false, query_is_paired_ = false;
};

// The query tiles [first, end) of a head absorb the keys together, so that a key tile is converted once for all.
template <typename T>
void forward_tiles(const BlockArgs& args, std::int64_t b, std::int64_t h, const Tile* first, const Tile* end,
                   const std::vector<Tile>& key_tiles) {
  using A = Accumulator<T>;
  Scratch& scratch = Scratch::of_this_thread();
  const std::int64_t pair_bytes =
      multiplies_pairs<T>() ? KeyPairs::elements(args, kTileKeys) * static_cast<std::int64_t>(sizeof(BFloat16)) : 0;
  scratch.reserve((KeyTile<T>::elements(args, kTileKeys) + (end - first) * ForwardTile<T>::elements(args)) *
                          static_cast<std::int64_t>(sizeof(A)) +
                      pair_bytes,
                  KeyTile<T>::kArrays + KeyPairs::kArrays + static_cast<int>(end - first) * ForwardTile<T>::kArrays);
  const std::int64_t kv_head = h / (args.Hq / args.Hkv);
  KeyTile<T> rows(args, b, kv_head, kTileKeys, scratch);
  std::optional<KeyPairs> packed;
  if (multiplies_pairs<T>()) packed.emplace(args, b, kv_head, kTileKeys, scratch);
  std::vector<ForwardTile<T>> tiles;
  tiles.reserve(static_cast<std::size_t>(end - first));
  bool any_sees = false;
  for (const Tile* queries = first; queries < end; ++queries) {
    bool sees = false;
    for (const Segment& keys : args.key_segments) sees |= any_visible(queries->segment, keys, args.mask);
    const bool store = args.store_state && !args.load_state;
    if (!sees && !store && !args.finalize) continue;
    tiles.emplace_back(args, b, h, *queries, scratch);
    tiles.back().load_state();
    if (sees) tiles.back().load_query(scratch);
    any_sees |= sees;
  }
  for (std::size_t i = 0; any_sees && i < key_tiles.size(); ++i) {
    rows.move_to(key_tiles[i]);
    if (packed) packed->move_to(key_tiles[i]);
    for (ForwardTile<T>& tile : tiles) tile.absorb(key_tiles[i], rows, packed ? &*packed : nullptr);
  }
  for (ForwardTile<T>& tile : tiles) tile.store();
}

}  // namespace

template <typename T>
void forward(const BlockArgs& args, const Launch& launch) {
  const std::vector<Tile> query_tiles = make_tiles(args.query_segments, kLanes);
  const std::vector<Tile> key_tiles = make_tiles(args.key_segments, kTileKeys);
  const TileGroups groups(query_tiles, args.B * args.Hq);
  run_tasks(launch, args.B * args.Hq * groups.per_head, [&](std::int64_t task) {
    const std::int64_t head = task / groups.per_head, group = task % groups.per_head;
    forward_tiles<T>(args, head / args.Hq, head % args.Hq, groups.begin(group), groups.end(group), key_tiles);
  });
}

template void forward<double>(const BlockArgs&, const Launch&);
template void forward<float>(const BlockArgs&, const Launch&);
template void forward<BFloat16>(const BlockArgs&, const Launch&);
template void forward<Float16>(const BlockArgs&, const Launch&);

}  // namespace ringattn::cpu
