// The backward kernel: scores are computed again from the inputs and lse, in two passes that own what they write.
//
// Per tile of queries (lanes m) and keys (n), all in A, with c = scale * log2(e):
//   P[n][m]   = 2^(c * sum_d K[n][d] * Qt[d][m] - log2(e) * lse[m])
//   dS[n][m]  = P[n][m] * (sum_d V[n][d] * dOt[d][m] - delta[m]) * scale
//   dV[n][d] += sum_m P[n][m] * dO[m][d]         pass over keys: a task owns up to kTaskKeys rows of dK and dV and
//   dK[n][d] += sum_m dS[n][m] * Q[m][d]         loops over the query heads of its group and their tiles
//   dQt[d][m] += sum_n K[n][d] * dS[n][m]        pass over queries: a task owns a tile of dQ, loops over key tiles
//
// The order inside a task is fixed, so the bits do not depend on the threads. Masked pairs have P = dS = 0; where the
// other factor is not finite the sums skip them, because 0 * NaN would leak.
#include "cpu/backward.h"

#include "cpu/key_tile.h"
#include "cpu/products.h"
#include "cpu/scratch.h"
#include "cpu/state.h"
#include "cpu/tiles.h"

namespace ringattn::cpu {
namespace {

constexpr std::int32_t kTaskKeys = 256;  // keys whose gradients a task of the pass over keys owns

// A tile of queries with all that backward needs of it, and room for its scores.
template <typename T>
class QueryTile {
  using A = Accumulator<T>;

 public:
  static constexpr int kArrays = 8;
  static std::int64_t elements(std::int64_t D) { return 4 * kLanes * padded(D) + 2 * kTileKeys * kLanes + 2 * kLanes; }

  QueryTile(const BlockArgs& args, Scratch& scratch) : args_(args), D_(padded(args.D)) {
    query_ = scratch.take<A>(kLanes * D_);
    query_t_ = scratch.take<A>(kLanes * D_);
    grad_out_ = scratch.take<A>(kLanes * D_);
    grad_out_t_ = scratch.take<A>(kLanes * D_);
    p_ = scratch.take<A>(kTileKeys * kLanes);
    ds_ = scratch.take<A>(kTileKeys * kLanes);
    lse2_ = scratch.take<A>(kLanes);
    delta_ = scratch.take<A>(kLanes);
  }

  void load(std::int64_t b, std::int64_t h, const Tile& queries) {
    queries_ = queries;
    load_rows(rows_at<const T>(args_.query, b, h, queries.row), query_, query_t_);
    load_rows(rows_at<const T>(args_.grad_out, b, h, queries.row), grad_out_, grad_out_t_);
    const std::int64_t row = state_row(args_, b, h) + queries.row;
    std::fill_n(lse2_, kLanes, A{0});
    std::fill_n(delta_, kLanes, A{0});
    for (std::int64_t i = 0; i < queries.count(); ++i) {
      lse2_[i] = static_cast<const A*>(args_.lse)[row + i] * static_cast<A>(kLog2E);
      delta_[i] = static_cast<const A*>(args_.delta)[row + i];
    }
  }

  // P and, if wanted, dS of the keys of a tile from `first` on; zero where the mask hides the pair.
  void score(RowSpan<const A> key, RowSpan<const A> value, std::int64_t count, const VisiblePairs* pairs,
             bool with_gradients) {
    const Micro<A>& kernels = micro<A>();
    multiply_rows(p_, key, query_t_, count, args_.D);
    if (with_gradients) multiply_rows(ds_, value, grad_out_t_, count, args_.D);
    kernels.score_gradients(p_, with_gradients ? ds_ : nullptr, count, lse2_, delta_,
                            static_cast<A>(args_.scale * kLog2E), static_cast<A>(args_.scale));
    if (!pairs) return;
    pairs->fill_invisible(p_, A{0});
    if (with_gradients) pairs->fill_invisible(ds_, A{0});
  }

  // grad_value[n][d] += sum_m P[n][m] * dO[m][d]
  void add_grad_value(A* grad_value, std::int64_t count, const VisiblePairs* pairs) const {
    add_over_queries(p_, grad_out_, grad_value, count, pairs);
  }

  // grad_key[n][d] += sum_m dS[n][m] * Q[m][d]
  void add_grad_key(A* grad_key, std::int64_t count, const VisiblePairs* pairs) const {
    add_over_queries(ds_, query_, grad_key, count, pairs);
  }

  // grad_query_t[d][m] += sum_n K[n][d] * dS[n][m]
  void add_grad_query(A* grad_query_t, RowSpan<const A> key, std::int64_t count, const VisiblePairs* pairs) const {
    add_over_keys(grad_query_t, key, ds_, count, args_.D, pairs);
  }

 private:
  void load_rows(RowSpan<const T> source, A* rows, A* columns) {
    copy_rows<T>(source, queries_.count(), args_.D, rows);
    std::fill(rows + queries_.count() * D_, rows + kLanes * D_, A{0});
    micro<A>().transpose(rows, D_, columns, kLanes, kLanes, D_);
  }

  // target[n][d] += sum over the tile's queries of weights[n][m] * rows[m][d]
  void add_over_queries(const A* weights, const A* rows, A* target, std::int64_t count,
                        const VisiblePairs* pairs) const {
    const Micro<A>& kernels = micro<A>();
    Product<A> product = {.c = target,
                          .c_stride = D_,
                          .a = weights,
                          .a_row_stride = kLanes,
                          .a_depth_stride = 1,
                          .b = rows,
                          .b_stride = D_,
                          .rows = count,
                          .depth = queries_.count(),
                          .columns = D_,
                          .accumulate = true};
    if (pairs && !kernels.all_finite(rows, D_, queries_.count(), D_)) {
      product.rows = 1;
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t n = pairs->first_key + i;
        product.c = target + i * D_;
        product.a = weights + i * kLanes + pairs->begin[n];
        product.b = rows + pairs->begin[n] * D_;
        product.depth = pairs->end[n] - pairs->begin[n];
        kernels.multiply(product);
      }
      return;
    }
    kernels.multiply(product);
  }

  const BlockArgs& args_;
  const std::int64_t D_;  // padded
  Tile queries_;
  A *query_, *grad_out_ /*[kLanes][D]*/, *query_t_, *grad_out_t_ /*[D][kLanes]*/;
  A *p_, *ds_ /*[kTileKeys][kLanes]*/, *lse2_, *delta_ /*[kLanes]*/;
};

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

template <typename T>
void backward_keys(const BlockArgs& args, std::int64_t b, std::int64_t kv_head, const Tile& keys,
                   const std::vector<Tile>& query_tiles) {
  using A = Accumulator<T>;
  const std::int64_t D = padded(args.D), group = args.Hq / args.Hkv;
  Scratch& scratch = Scratch::of_this_thread();
  scratch.reserve((2 * kTaskKeys * D + KeyTile<T>::elements(args, kTaskKeys) + QueryTile<T>::elements(args.D)) *
                      static_cast<std::int64_t>(sizeof(A)),
                  2 + KeyTile<T>::kArrays + QueryTile<T>::kArrays);
  A* grad_key = scratch.take<A>(kTaskKeys * D);
  A* grad_value = scratch.take<A>(kTaskKeys * D);
  KeyTile<T> rows(args, b, kv_head, kTaskKeys, scratch);
  rows.move_to(keys);
  QueryTile<T> tile(args, scratch);
  std::fill_n(grad_key, keys.count() * D, A{0});
  std::fill_n(grad_value, keys.count() * D, A{0});

  for (std::int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    for (const Tile& queries : query_tiles) {
      if (!any_visible(queries.segment, keys.segment, args.mask)) continue;
      tile.load(b, h, queries);
      for (std::int32_t offset = 0; offset < keys.count(); offset += kTileKeys) {
        const Segment part = keys.segment.part(offset, std::min(kTileKeys, keys.count() - offset));
        with_visible_keys(queries, part, args.mask,
                          [&](std::int32_t first, std::int32_t count, const VisiblePairs* pairs) {
                            const std::int64_t row = offset + first;
                            tile.score(rows.key(row), rows.value(row), count, pairs, args.grad_key.data != nullptr);
                            if (args.grad_value.data) tile.add_grad_value(grad_value + row * D, count, pairs);
                            if (args.grad_key.data) tile.add_grad_key(grad_key + row * D, count, pairs);
                          });
      }
    }
  }
  if (args.grad_key.data) {
    add_rows(grad_key, D, rows_at<A>(args.grad_key, b, kv_head, keys.row), keys.count(), args.D);
  }
  if (args.grad_value.data) {
    add_rows(grad_value, D, rows_at<A>(args.grad_value, b, kv_head, keys.row), keys.count(), args.D);
  }
}

// dQ of the query tiles [first, end) of a head.
template <typename T>
void backward_queries(const BlockArgs& args, std::int64_t b, std::int64_t h, const Tile* first, const Tile* end,
                      const std::vector<Tile>& key_tiles) {
  using A = Accumulator<T>;
  const std::int64_t D = padded(args.D), kv_head = h / (args.Hq / args.Hkv);
  struct Target {
    Tile queries;
    QueryTile<T> tile;
    A* grad_query_t;  // [D][kLanes]
  };
  std::vector<Target> targets;
  targets.reserve(static_cast<std::size_t>(end - first));
  Scratch& scratch = Scratch::of_this_thread();
  scratch.reserve((kLanes * D + KeyTile<T>::elements(args, kTileKeys) +
                   (end - first) * (QueryTile<T>::elements(args.D) + D * kLanes)) *
                      static_cast<std::int64_t>(sizeof(A)),
                  1 + KeyTile<T>::kArrays + static_cast<int>(end - first) * (QueryTile<T>::kArrays + 1));
  A* grad_query = scratch.take<A>(kLanes * D);
  KeyTile<T> rows(args, b, kv_head, kTileKeys, scratch);
  for (const Tile* queries = first; queries < end; ++queries) {
    bool sees = false;
    for (const Segment& keys : args.key_segments) sees |= any_visible(queries->segment, keys, args.mask);
    if (!sees) continue;
    Target& target = targets.emplace_back(Target{*queries, QueryTile<T>(args, scratch), scratch.take<A>(D * kLanes)});
    target.tile.load(b, h, *queries);
    std::fill_n(target.grad_query_t, D * kLanes, A{0});
  }
  if (targets.empty()) return;

  for (const Tile& keys : key_tiles) {
    rows.move_to(keys);
    for (Target& target : targets) {
      with_visible_keys(target.queries, keys.segment, args.mask,
                        [&](std::int32_t first_key, std::int32_t count, const VisiblePairs* pairs) {
                          target.tile.score(rows.key(first_key), rows.value(first_key), count, pairs, true);
                          target.tile.add_grad_query(target.grad_query_t, rows.key(first_key), count, pairs);
                        });
    }
  }
  for (const Target& target : targets) {
    micro<A>().transpose(target.grad_query_t, kLanes, grad_query, D, D, kLanes);
    add_rows(grad_query, D, rows_at<A>(args.grad_query, b, h, target.queries.row), target.queries.count(), args.D);
  }
}

}  // namespace

template <typename T>
void backward(const BlockArgs& args, const Launch& launch) {
  const std::vector<Tile> query_tiles = make_tiles(args.query_segments, kLanes);
  if (args.grad_key.data || args.grad_value.data) {
    const std::vector<Tile> key_tiles = make_tiles(args.key_segments, kTaskKeys);
    const std::int64_t tiles = static_cast<std::int64_t>(key_tiles.size());
    run_tasks(launch, args.B * args.Hkv * tiles, [&](std::int64_t task) {
      const std::int64_t head = task / tiles;
      backward_keys<T>(args, head / args.Hkv, head % args.Hkv, key_tiles[task % tiles], query_tiles);
    });
  }
  if (args.grad_query.data) {
    const std::vector<Tile> key_tiles = make_tiles(args.key_segments, kTileKeys);
    const TileGroups groups(query_tiles, args.B * args.Hq);
    run_tasks(launch, args.B * args.Hq * groups.per_head, [&](std::int64_t task) {
      const std::int64_t head = task / groups.per_head, group = task % groups.per_head;
      backward_queries<T>(args, head / args.Hq, head % args.Hq, groups.begin(group), groups.end(group), key_tiles);
    });
  }
}

template void backward<double>(const BlockArgs&, const Launch&);
template void backward<float>(const BlockArgs&, const Launch&);
template void backward<BFloat16>(const BlockArgs&, const Launch&);
template void backward<Float16>(const BlockArgs&, const Launch&);

}  // namespace ringattn::cpu
