// A tile of queries in backward: what is computed again from it, and what it adds to the gradients.
#pragma once

#include "cpu/key_pairs.h"
#include "cpu/key_tile.h"
#include "cpu/products.h"
#include "cpu/scratch.h"
#include "cpu/state.h"
#include "cpu/tiles.h"

namespace ringattn::cpu {

// Where a tile of queries and a tile of keys add their parts; null: not wanted.
template <typename A>
struct GradientTargets {
  A *key, *value;  // [keys][D], from the first row of the keys on
  A* query_t;      // [D][kLanes]
};

// lse in base 2 and delta of the queries of a tile, 0 beyond its end.
template <typename A>
void load_statistics(const BlockArgs& args, std::int64_t row, std::int64_t count, A* lse2, A* delta) {
  std::fill_n(lse2, kLanes, A{0});
  std::fill_n(delta, kLanes, A{0});
  for (std::int64_t i = 0; i < count; ++i) {
    lse2[i] = static_cast<const A*>(args.lse)[row + i] * static_cast<A>(kLog2E);
    delta[i] = static_cast<const A*>(args.delta)[row + i];
  }
}

// In the accumulation type.
template <typename T>
class QueryTile {
  using A = Accumulator<T>;

 public:
  static constexpr int kArrays = 8;
  static std::int64_t bytes(const BlockArgs& args) {
    return (4 * kLanes * padded(args.D) + 2 * kTileKeys * kLanes + 2 * kLanes) * static_cast<std::int64_t>(sizeof(A));
  }

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
    load_statistics(args_, state_row(args_, b, h) + queries.row, queries.count(), lse2_, delta_);
  }

  // The parts of the `count` keys from row `first` of the tile on; `pairs` is null if all pairs are visible.
  void add(KeyTile<T>& keys, std::int64_t first, std::int64_t count, const VisiblePairs* pairs,
           const GradientTargets<A>& targets) {
    const bool with_gradients = targets.key != nullptr || targets.query_t != nullptr;
    score(keys.key(first), keys.value(first), count, pairs, with_gradients);
    if (targets.value != nullptr) add_over_queries(p_, grad_out_, targets.value + first * D_, count, pairs);
    if (targets.key != nullptr) add_over_queries(ds_, query_, targets.key + first * D_, count, pairs);
    if (targets.query_t != nullptr) add_over_keys(targets.query_t, keys.key(first), ds_, count, args_.D, pairs);
  }

 private:
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

// In pairs of bfloat16: for instruction sets and tiles whose products take them.
class QueryPairs {
 public:
  static constexpr int kArrays = 12;
  static std::int64_t bytes(const BlockArgs& args) {
    const std::int64_t halves = 6 * kLanes * padded(args.D) + 3 * kTileKeys * kLanes;
    return 2 * halves + 4 * (2 * kTileKeys * kLanes + 2 * kLanes);
  }

  QueryPairs(const BlockArgs& args, Scratch& scratch)
      : args_(args), D_(padded(args.D)), query_rows_(kLanes, args.D, scratch), grad_out_rows_(kLanes, args.D, scratch) {
    for (std::uint16_t** array : {&query_t_, &query_, &grad_out_t_, &grad_out_}) {
      *array = scratch.take<std::uint16_t>(kLanes * D_);
    }
    for (std::uint16_t** array : {&p_, &ds_, &ds_pairs_}) *array = scratch.take<std::uint16_t>(kTileKeys * kLanes);
    scores_ = scratch.take<float>(kTileKeys * kLanes);
    gradients_ = scratch.take<float>(kTileKeys * kLanes);
    lse2_ = scratch.take<float>(kLanes);
    delta_ = scratch.take<float>(kLanes);
  }

  // Returns whether products of pairs are worth it: few queries are special.
  bool load(std::int64_t b, std::int64_t h, const Tile& queries) {
    queries_ = queries;
    load_statistics(args_, state_row(args_, b, h) + queries.row, queries.count(), lse2_, delta_);
    special_ = copy_both(query_rows_, rows_at<const BFloat16>(args_.query, b, h, queries.row), grad_out_rows_,
                         rows_at<const BFloat16>(args_.grad_out, b, h, queries.row), queries.count());
    if (!are_few(special_, queries.count())) return false;
    arrange(query_rows_, query_, query_t_);
    arrange(grad_out_rows_, grad_out_, grad_out_t_);
    return true;
  }

  const std::vector<std::int32_t>& special() const { return special_; }

  // The parts of the `count` keys from row `first`, an even one, of the tile on, but for special keys and special
  // queries.
  void add(KeyPairs& keys, std::int64_t first, std::int64_t count, const VisiblePairs* pairs,
           const GradientTargets<float>& targets) {
    const std::int64_t from = pairs ? pairs->even_first() : 0, end = pairs ? pairs->even_end() : even(count);
    const std::int64_t row = first + from, rows = end - from;
    const bool with_gradients = targets.key != nullptr || targets.query_t != nullptr;
    multiply_rows(scores_, keys.key(row), query_t_, rows);
    if (with_gradients) multiply_rows(gradients_, keys.value(row), grad_out_t_, rows);
    pair_kernels().score_gradients(scores_, with_gradients ? gradients_ : nullptr, rows, lse2_, delta_,
                                   static_cast<float>(args_.scale * kLog2E), static_cast<float>(args_.scale), p_, ds_,
                                   ds_pairs_);
    clear_invisible(count, pairs);
    for (const std::int32_t n : keys.special()) {
      if (n >= row && n < row + rows) clear(n - row, 0, kLanes);
    }
    for (const std::int32_t m : special_) {
      for (std::int64_t n = 0; n < rows; ++n) clear(n, m, m + 1);
    }
    if (targets.value != nullptr) add_over_queries(p_, grad_out_, targets.value + row * D_, rows);
    if (targets.key != nullptr) add_over_queries(ds_, query_, targets.key + row * D_, rows);
    if (targets.query_t == nullptr) return;
    pair_kernels().multiply({.c = targets.query_t,
                             .c_stride = kLanes,
                             .a = keys.key_pairs(row),
                             .a_row_stride = 2,
                             .a_depth_stride = 2 * D_,
                             .b = ds_pairs_,
                             .b_stride = 2 * kLanes,
                             .rows = args_.D,
                             .depth = rows / 2,
                             .columns = kLanes,
                             .accumulate = true});
  }

 private:
  // rows: pairs of queries, [kLanes/2][D][2]; columns: pairs of elements, [D/2][kLanes][2], by a transposition of
  // pairs, which are as large as floats.
  void arrange(const PairRows& source, std::uint16_t* rows, std::uint16_t* columns) const {
    std::fill(source.row(queries_.count()), source.row(kLanes), std::uint16_t{0});
    pair_kernels().pair_rows(source.row(0), D_, rows, kLanes, D_);
    micro<float>().transpose(reinterpret_cast<const float*>(source.row(0)), D_ / 2, reinterpret_cast<float*>(columns),
                             kLanes, kLanes, D_ / 2);
  }

  // target[n][m] = sum_d rows[n][d] * columns[d][m]
  void multiply_rows(float* target, const std::uint16_t* rows, const std::uint16_t* columns, std::int64_t count) const {
    pair_kernels().multiply({.c = target,
                             .c_stride = kLanes,
                             .a = rows,
                             .a_row_stride = D_,
                             .a_depth_stride = 2,
                             .b = columns,
                             .b_stride = 2 * kLanes,
                             .rows = count,
                             .depth = even(args_.D) / 2,
                             .columns = kLanes,
                             .accumulate = false});
  }

  // target[n][d] += sum over the tile's queries of weights[n][m] * rows[m][d]
  void add_over_queries(const std::uint16_t* weights, const std::uint16_t* rows, float* target,
                        std::int64_t count) const {
    pair_kernels().multiply({.c = target,
                             .c_stride = D_,
                             .a = weights,
                             .a_row_stride = kLanes,
                             .a_depth_stride = 2,
                             .b = rows,
                             .b_stride = 2 * D_,
                             .rows = count,
                             .depth = even(queries_.count()) / 2,
                             .columns = D_,
                             .accumulate = true});
  }

  // Zeros where the mask hides a pair, and in the row that makes an odd number of keys even.
  void clear_invisible(std::int64_t count, const VisiblePairs* pairs) {
    if (pairs) {
      pairs->fill_invisible_even(p_, std::uint16_t{0});
      pairs->fill_invisible_even(ds_, std::uint16_t{0});
      pairs->clear_invisible_pairs(ds_pairs_);
    } else if (count % 2 != 0) {
      clear(count, 0, kLanes);
    }
  }

  // Zeros for the queries [from, to) of row n.
  void clear(std::int64_t n, std::int64_t from, std::int64_t to) {
    std::fill(p_ + n * kLanes + from, p_ + n * kLanes + to, std::uint16_t{0});
    std::fill(ds_ + n * kLanes + from, ds_ + n * kLanes + to, std::uint16_t{0});
    for (std::int64_t m = from; m < to; ++m) ds_pairs_[n / 2 * 2 * kLanes + 2 * m + n % 2] = 0;
  }

  const BlockArgs& args_;
  const std::int64_t D_;  // padded
  Tile queries_;
  PairRows query_rows_, grad_out_rows_;
  std::vector<std::int32_t> special_;
  std::uint16_t *query_t_, *query_, *grad_out_t_, *grad_out_;
  std::uint16_t *p_, *ds_ /*[kTileKeys][kLanes]*/, *ds_pairs_ /*[kTileKeys/2][kLanes][2]*/;
  float *scores_, *gradients_ /*[kTileKeys][kLanes]*/, *lse2_, *delta_ /*[kLanes]*/;
};

}  // namespace ringattn::cpu
