// A tile of queries in forward: its state, transposed so that a lane is a query, and what a tile of keys adds to it.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "cpu/key_tile.h"
#include "cpu/packed_keys.h"
#include "cpu/products.h"
#include "cpu/scratch.h"
#include "cpu/state.h"
#include "cpu/tiles.h"

namespace ringattn::cpu {

// Whether forward multiplies pairs: for smaller factors their exponentials are not made.
template <typename T>
bool forward_multiplies_pairs(const BlockArgs& args) {
  return multiplies_pairs<T>() && args.scale * kLog2E >= static_cast<double>(kSmallestFactor);
}

// A tile of keys. packed is null if there are no products of pairs.
template <typename T>
struct ReadyKeys {
  KeyTile<T>* rows;
  const PackedKeys* packed;
};

// What the query tiles of a task use one after the other.
template <typename T>
struct ForwardWork {
  using A = Accumulator<T>;
  static constexpr int kArrays = 7;
  static std::int64_t bytes(const BlockArgs& args) {
    return (kLanes * padded(args.D) + kTileKeys * kLanes + 4 * kLanes) * static_cast<std::int64_t>(sizeof(A)) +
           kTileKeys * kLanes * 2;
  }

  ForwardWork(const BlockArgs& args, Scratch& scratch)
      : rows(scratch.take<A>(kLanes * padded(args.D))),
        scores(scratch.take<A>(kTileKeys * kLanes)),
        m(scratch.take<A>(kLanes)),
        sum(scratch.take<A>(kLanes)),
        factor(scratch.take<A>(kLanes)),
        visible(scratch.take<A>(kLanes)),
        p_pairs(scratch.take<std::uint16_t>(kTileKeys * kLanes)) {}

  A *rows /*[kLanes][D]*/, *scores /*[kTileKeys][kLanes]*/;
  A *m, *sum, *factor, *visible /*[kLanes] each*/;  // m: the new reference
  std::uint16_t* p_pairs /*[kTileKeys/2][kLanes][2]*/;
};

// Lanes beyond the tile's end hold Q = 0.
template <typename T>
class ForwardTile {
  using A = Accumulator<T>;

 public:
  static constexpr int kArrays = 5;
  static std::int64_t bytes(const BlockArgs& args) {
    return (2 * kLanes * padded(args.D) + 2 * kLanes) * static_cast<std::int64_t>(sizeof(A)) +
           PairRows::elements(kLanes, args.D) * 2;
  }

  ForwardTile(const BlockArgs& args, std::int64_t b, std::int64_t h, const Tile& queries, const ForwardWork<T>& work,
              Scratch& scratch)
      : args_(args),
        b_(b),
        h_(h),
        queries_(queries),
        row_(state_row(args, b, h) + queries.row),
        D_(padded(args.D)),
        work_(work) {
    query_ = scratch.take<A>(D_ * kLanes);
    o_ = scratch.take<A>(D_ * kLanes);
    m_ = scratch.take<A>(kLanes);
    l_ = scratch.take<A>(kLanes);
    query_pairs_ = scratch.take<std::uint16_t>(PairRows::elements(kLanes, args.D));
  }

  const Tile& queries() const { return queries_; }

  // For products of pairs, if they are worth it. `rows` is free afterwards.
  void load_query_pairs(PairRows& rows) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      rows.copy(rows_at<const T>(args_.query, b_, h_, queries_.row), queries_.count());
      special_queries_ = rows.special();
      query_is_paired_ = are_few(special_queries_, queries_.count());
      if (!query_is_paired_) return;
      // query_pairs[d/2][m][2] = Q[m][d]: a transposition of pairs, which are as large as floats.
      std::fill(rows.row(queries_.count()), rows.row(kLanes), std::uint16_t{0});
      micro<float>().transpose(reinterpret_cast<const float*>(rows.row(0)), D_ / 2,
                               reinterpret_cast<float*>(query_pairs_), kLanes, kLanes, D_ / 2);
    }
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
    copy_rows<A>({static_cast<const A*>(args_.o) + row_ * args_.D, args_.D}, queries_.count(), args_.D, work_.rows);
    transpose_rows(o_);
  }

  // `visibility`: not skip.
  void absorb(const Tile& keys, Visibility visibility, const ReadyKeys<T>& ready) {
    std::optional<VisiblePairs> pairs;
    if (visibility == Visibility::partial) pairs.emplace(queries_.segment, keys.segment, args_.mask);
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (query_is_paired_ && ready.packed->is_worth_it()) {
        return absorb_pairs(*ready.packed, keys.count(), pairs ? &*pairs : nullptr);
      }
    }
    if (pairs) {
      absorb_rows(*ready.rows, pairs->first_key, pairs->end_key, &*pairs);
    } else {
      absorb_rows(*ready.rows, 0, keys.count(), nullptr);
    }
  }

  // Writes what the call asks for: the state, or the result, or both.
  void store() {
    micro<A>().transpose(o_, kLanes, work_.rows, D_, D_, kLanes);
    for (std::int64_t i = 0; i < queries_.count(); ++i) {
      A* o = work_.rows + i * D_;
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
  A factor() const { return static_cast<A>(args_.scale * kLog2E); }

  // Absorbs the keys [first, end) of a tile; the others are seen by no query of this one. `pairs` is null if all pairs
  // are visible.
  void absorb_rows(KeyTile<T>& rows, std::int32_t first, std::int32_t end, const VisiblePairs* pairs) {
    if (!has_query_rows_) load_query_rows();
    const Micro<A>& kernels = micro<A>();
    const std::int64_t count = end - first;
    const auto score = [&](A* largest) {
      std::copy_n(m_, kLanes, work_.m);
      multiply_rows(work_.scores, rows.key(first), query_, count, args_.D, largest);
      if (pairs) pairs->fill_invisible(work_.scores, kMinusInfinity<A>);
      if (largest == nullptr) kernels.column_max(work_.scores, count, work_.m);
      return kernels.exponentials(work_.scores, count, work_.m, factor(), work_.sum, kRounding<T>);
    };
    // The product passes over a NaN among the scores, which makes the sum NaN.
    if (pairs || !score(work_.m)) score(nullptr);
    if (pairs) pairs->fill_invisible(work_.scores, A{0});
    add_over_keys(o_, rows.value(first), work_.scores, count, args_.D, pairs, move_to_new_reference(pairs));
  }

  // The same with products of pairs of the tile's `count` keys.
  void absorb_pairs(const PackedKeys& keys, std::int64_t count, const VisiblePairs* pairs) {
    const Pairs& kernels = pair_kernels();
    const std::int64_t first = pairs ? pairs->even_first() : 0, end = pairs ? pairs->even_end() : even(count);
    const bool some_special = !keys.special().empty() || !special_queries_.empty();
    const bool all_visible = !pairs && end == count;
    std::copy_n(m_, kLanes, work_.m);
    kernels.multiply({.c = work_.scores,
                      .c_stride = kLanes,
                      .a = keys.key(first),
                      .a_row_stride = D_,
                      .a_depth_stride = 2,
                      .b = query_pairs_,
                      .b_stride = 2 * kLanes,
                      .rows = end - first,
                      .depth = even(args_.D) / 2,
                      .columns = kLanes,
                      .accumulate = false,
                      .largest = all_visible && !some_special ? work_.m : nullptr});
    if (some_special) score_special(keys, first, end, count);
    if (pairs) {
      pairs->fill_invisible_even(work_.scores, kMinusInfinity<float>);
    } else if (!all_visible) {
      std::fill_n(work_.scores + count * kLanes, kLanes, kMinusInfinity<float>);
    }
    const auto exponentials = [&] {
      return kernels.exponentials(work_.scores, end - first, work_.m, factor(), work_.sum, work_.p_pairs);
    };
    if (!all_visible || some_special || !exponentials()) {
      std::copy_n(m_, kLanes, work_.m);
      kernels.column_max(work_.scores, end - first, work_.m);
      exponentials();
    }
    if (pairs) pairs->clear_invisible_pairs(work_.p_pairs);
    kernels.multiply({.c = o_,
                      .c_stride = kLanes,
                      .a = keys.value_pairs(first),
                      .a_row_stride = 2,
                      .a_depth_stride = 2 * D_,
                      .b = work_.p_pairs,
                      .b_stride = 2 * kLanes,
                      .rows = args_.D,
                      .depth = (end - first) / 2,
                      .columns = kLanes,
                      .accumulate = true,
                      .factor = move_to_new_reference(pairs)});
    if (!keys.special().empty()) add_special(keys, first, end, pairs);
  }

  // From m to the new reference: l takes the sum in. Returns what o must be multiplied by, null if by nothing. Queries
  // that see no key stay.
  const A* move_to_new_reference(const VisiblePairs* pairs) {
    if (pairs) std::copy_n(pairs->sees, kLanes, work_.visible);
    const bool some_move =
        micro<A>().advance(m_, work_.m, factor(), pairs ? work_.visible : nullptr, work_.sum, l_, work_.factor);
    std::copy_n(work_.m, kLanes, m_);
    return some_move ? work_.factor : nullptr;
  }

  // The scores of special keys and special queries, for keys [first, end).
  void score_special(const PackedKeys& keys, std::int64_t first, std::int64_t end, std::int64_t count) {
    const RowSpan<const T> query = rows_at<const T>(args_.query, b_, h_, queries_.row);
    const auto score = [&](std::int64_t n, std::int64_t m) {
      const BFloat16 *k = keys.whole_key(n), *q = query.row(m);
      float sum = 0;
      for (std::int64_t d = 0; d < args_.D; ++d) sum += to_float(k[d]) * to_float(q[d]);
      work_.scores[(n - first) * kLanes + m] = sum;
    };
    for (const std::int32_t n : keys.special()) {
      if (n < first || n >= end) continue;
      for (std::int64_t m = 0; m < queries_.count(); ++m) score(n, m);
    }
    for (const std::int32_t m : special_queries_) {
      for (std::int64_t n = first; n < std::min(end, count); ++n) score(n, m);
    }
  }

  // What the values of special keys add to o.
  void add_special(const PackedKeys& keys, std::int64_t first, std::int64_t end, const VisiblePairs* pairs) {
    for (const std::int32_t n : keys.special()) {
      if (n < first || n >= end) continue;
      const std::int64_t from = pairs ? pairs->begin[n] : 0, to = pairs ? pairs->end[n] : queries_.count();
      const std::uint16_t* p = work_.p_pairs + (n - first) / 2 * 2 * kLanes + (n - first) % 2;
      for (std::int64_t d = 0; d < args_.D; ++d) {
        const float value = to_float(keys.whole_value(n)[d]);
        for (std::int64_t m = from; m < to; ++m) o_[d * kLanes + m] += value * to_float({p[2 * m]});
      }
    }
  }

  void load_query_rows() {
    copy_rows<T>(rows_at<const T>(args_.query, b_, h_, queries_.row), queries_.count(), args_.D, work_.rows);
    transpose_rows(query_);
    has_query_rows_ = true;
  }

  // The rows of the tile, and zeros beyond its end, as columns.
  void transpose_rows(A* target) {
    std::fill(work_.rows + queries_.count() * D_, work_.rows + kLanes * D_, A{0});
    micro<A>().transpose(work_.rows, D_, target, kLanes, kLanes, D_);
  }

  const BlockArgs& args_;
  const std::int64_t b_, h_;
  const Tile queries_;
  const std::int64_t row_;  // of the tile's first query among all rows of m
  const std::int64_t D_;    // padded
  const ForwardWork<T>& work_;
  A *query_, *o_ /*[D][kLanes]*/, *m_, *l_ /*[kLanes]*/;
  std::uint16_t* query_pairs_ /*[D/2][kLanes][2]*/;
  std::vector<std::int32_t> special_queries_;
  bool has_query_rows_ = false, query_is_paired_ = false;
};

}  // namespace ringattn::cpu
