// Few query rows against a tile of keys, straight from the storage type: lanes lie along D, so that keys and values are
// read once, in the order they lie in memory, and no lane waits for a query that is not there. Included by micro.cpp
// alone.
//
// A score starts as a vector of partial sums. As many of these as a vector has lanes are added up across their lanes
// together: an addition folds two of them into one, until a single vector holds all the scores.
#pragma once

#include "cpu/micro.h"
#include "cpu/micro_convert.h"
#include "cpu/micro_fold.h"
#include "cpu/micro_softmax.h"
#include "cpu/micro_stored_rows.h"
#include "cpu/micro_vector.h"

namespace ringattn::cpu {
namespace {

// Rows that a step takes together, and vectors of output columns: their product stays in registers.
template <typename A>
constexpr int kRowBlock = kCount<A> < 4 ? kCount<A> : 4;
constexpr int kRowVectors = kVectorBytes == 64 ? 16 : 8;

// What a score is made of: 2 * kCount numbers of a query row and of a key at a time.
template <typename Rows>
struct SumOfProducts {
  using A = typename Rows::A;
  using Element = typename Rows::Element;
  struct Part {
    Vector<A> first, second;
  };
  static Part query(const FewRows<A>& tile, std::int64_t r, std::int64_t d) {
    const A* row = tile.query + r * tile.D;
    return {load<Vector<A>>(row + first_of<Rows>(d)), load<Vector<A>>(row + second_of<Rows>(d, tile.D))};
  }
  static Part key(const Element* source) {
    Part part;
    Rows::load_two(source, part.first, part.second);
    return part;
  }
  static void add(Vector<A>& sum, const Part& query, const Part& key) {
    sum += query.first * key.first;
    sum += query.second * key.second;
  }
};

template <typename A>
inline std::int64_t row_blocks(const FewRows<A>& tile) {
  return (tile.rows + kRowBlock<A> - 1) / kRowBlock<A>;
}

// Of the keys that usually follow, while `passes` passes of `steps` steps are made.
template <typename Element, typename A>
inline Fetch next_keys(const FewRows<A>& tile, std::int64_t passes, std::int64_t steps) {
  return {static_cast<const Element*>(tile.key) + tile.keys * tile.key_stride,
          tile.key_stride,
          tile.keys,
          tile.D,
          sizeof(Element),
          passes * steps};
}

// The scores of `Rows` rows from r on with the keys from n on, as many as make up a vector of scores. Beyond the last
// key that key is taken again.
template <typename Products, int Rows>
inline void score_block(const FewRows<typename Products::A>& tile, std::int64_t r, std::int64_t n, Fetch& fetch) {
  using A = typename Products::A;
  using V = Vector<A>;
  constexpr int count = kCount<A>, keys = count / Rows, together = keys < 4 ? keys : 4;
  const auto* key = static_cast<const typename Products::Element*>(tile.key);
  V sums[count];
#pragma GCC unroll 16
  for (int first = 0; first < keys; first += together) {
    const typename Products::Element* k[together];
#pragma GCC unroll 4
    for (int j = 0; j < together; ++j) {
      const std::int64_t index = n + first + j;
      k[j] = key + (index < tile.keys ? index : tile.keys - 1) * tile.key_stride;
    }
    V sum[Rows][together] = {};
    for (std::int64_t d = 0; d < tile.D; d += 2 * count) {
      fetch.step();
      typename Products::Part row[Rows];
#pragma GCC unroll 4
      for (int i = 0; i < Rows; ++i) row[i] = Products::query(tile, r + i, d);
#pragma GCC unroll 4
      for (int j = 0; j < together; ++j) {
        const typename Products::Part x = Products::key(k[j] + d);
#pragma GCC unroll 4
        for (int i = 0; i < Rows; ++i) Products::add(sum[i][j], row[i], x);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < together; ++j) sums[i * keys + first + j] = sum[i][j];
    }
  }
  const V scores = fold_all<Sum, count>(sums);
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) {
    __builtin_memcpy(tile.p + (r + i) * kFewRowsKeys + n, reinterpret_cast<const A*>(&scores) + i * keys,
                     keys * sizeof(A));
  }
}

// All scores. Whole blocks of rows share the reading of a few keys; then come the one to three rows left over.
template <typename Products>
void score(const FewRows<typename Products::A>& tile, Fetch& fetch) {
  using A = typename Products::A;
  constexpr int block = kRowBlock<A>, count = kCount<A>;
  const std::int64_t blocks = tile.rows / block * block;
  for (std::int64_t n = 0; n < tile.keys && blocks > 0; n += count / block) {
    for (std::int64_t r = 0; r < blocks; r += block) score_block<Products, block>(tile, r, n, fetch);
  }
  std::int64_t r = blocks;
  if (block > 2 && tile.rows - r >= 2) {
    for (std::int64_t n = 0; n < tile.keys; n += count / 2) score_block<Products, 2>(tile, r, n, fetch);
    r += 2;
  }
  if (r < tile.rows) {
    for (std::int64_t n = 0; n < tile.keys; n += count) score_block<Products, 1>(tile, r, n, fetch);
  }
}

template <typename A, Rounding rounding>
inline void soften_row(A* p, std::int64_t keys, A c, A* m, A* l) {
  using V = Vector<A>;
  constexpr int count = kCount<A>;
  const A minus_infinity = static_cast<A>(-__builtin_inf());
  for (std::int64_t n = keys; n % count != 0; ++n) p[n] = minus_infinity;  // weighs nothing, if there is any maximum
  V most = load<V>(p);
  for (std::int64_t n = count; n < keys; n += count) most = Maximum{}(load<V>(p + n), most);
  const A largest = across<Maximum>(most);
  V total = V{};
  const V reference = splat(largest);
  for (std::int64_t n = 0; n < keys; n += count) {
    V x = exp2_of((load<V>(p + n) - reference) * c);
    total += x;
    if constexpr (rounding == Rounding::bfloat16) x = BFloat16Format::round(x);
    if constexpr (rounding == Rounding::float16) x = Float16Format::round(x);
    store(p + n, x);
  }
  *m = largest;
  *l = across<Sum>(total);
}

template <typename A>
void soften(const FewRows<A>& tile) {
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    A* p = tile.p + r * kFewRowsKeys;
    if constexpr (sizeof(A) == sizeof(float)) {
      if (tile.rounding == Rounding::bfloat16) {
        soften_row<A, Rounding::bfloat16>(p, tile.keys, tile.c, tile.m + r, tile.l + r);
        continue;
      }
      if (tile.rounding == Rounding::float16) {
        soften_row<A, Rounding::float16>(p, tile.keys, tile.c, tile.m + r, tile.l + r);
        continue;
      }
    }
    soften_row<A, Rounding::none>(p, tile.keys, tile.c, tile.m + r, tile.l + r);
  }
}

template <typename Storage, int Rows, int Vectors>
inline void value_block(const FewRows<typename Storage::A>& tile, std::int64_t r, std::int64_t d, Fetch& fetch) {
  using A = typename Storage::A;
  using V = Vector<A>;
  constexpr int count = kCount<A>;
  const auto* value = static_cast<const typename Storage::Element*>(tile.value) + d;
  const A* p = tile.p + r * kFewRowsKeys;
  V sum[Rows][Vectors] = {};
  for (std::int64_t n = 0; n < tile.keys; ++n, value += tile.value_stride) {
    fetch.step();
    V x[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v += 2) Storage::load_two(value + v * count, x[v], x[v + 1]);
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) {
      const V weight = splat<A>(p[i * kFewRowsKeys + n]);
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) sum[i][v] += weight * x[v];
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) {
    A* o = tile.o + (r + i) * tile.D;
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v += 2) {
      store(o + first_of<Storage>(d + v * count), sum[i][v]);
      store(o + second_of<Storage>(d + v * count, tile.D), sum[i][v + 1]);
    }
  }
}

// All rows, for the columns from d on: as many whole steps of `Vectors` vectors as there are, then smaller ones.
template <typename Storage, int Vectors>
void add_values(const FewRows<typename Storage::A>& tile, std::int64_t d, Fetch& fetch) {
  using A = typename Storage::A;
  constexpr int block = kRowVectors / Vectors < kRowBlock<A> ? kRowVectors / Vectors : kRowBlock<A>;
  for (; d + Vectors * kCount<A> <= tile.D; d += Vectors * kCount<A>) {
    std::int64_t r = 0;
    for (; r + block <= tile.rows; r += block) value_block<Storage, block, Vectors>(tile, r, d, fetch);
    if constexpr (block > 2) {
      if (tile.rows - r >= 2) value_block<Storage, 2, Vectors>(tile, r, d, fetch), r += 2;
    }
    if constexpr (block > 1) {
      if (r < tile.rows) value_block<Storage, 1, Vectors>(tile, r, d, fetch);
    }
  }
  if constexpr (Vectors > 2) {
    if (d < tile.D) add_values<Storage, Vectors / 2>(tile, d, fetch);
  }
}

// All scores; meanwhile the values are fetched.
template <typename Products>
void score_keys(const FewRows<typename Products::A>& tile) {
  using A = typename Products::A;
  constexpr int count = kCount<A>, block = kRowBlock<A>;
  const std::int64_t keys = count / (tile.rows < block ? tile.rows < 2 ? 1 : 2 : block), together = keys < 4 ? keys : 4;
  Fetch fetch(tile.value, tile.value_stride, tile.keys, tile.D, sizeof(typename Products::Element),
              (tile.keys + together - 1) / together * row_blocks(tile) * (tile.D / (2 * count)));
  score<Products>(tile, fetch);
}

// The values; meanwhile the keys that usually follow are fetched.
template <typename Storage>
void attend_values(const FewRows<typename Storage::A>& tile) {
  using A = typename Storage::A;
  constexpr int narrow = kRowVectors / kRowBlock<A>, wide = 2 * narrow;
  // Whole rows are read in order where their sums fit in registers; for more query rows, columns in parts are.
  const bool is_wide = tile.rows * wide <= kRowVectors;
  const std::int64_t columns = kCount<A> * (is_wide ? wide : narrow);
  Fetch fetch =
      next_keys<typename Storage::Element>(tile, row_blocks(tile) * ((tile.D + columns - 1) / columns), tile.keys);
  if (is_wide) {
    add_values<Storage, wide>(tile, 0, fetch);
  } else {
    add_values<Storage, narrow>(tile, 0, fetch);
  }
}

template <typename Storage>
void attend(const FewRows<typename Storage::A>& tile) {
  score_keys<SumOfProducts<Storage>>(tile);
  soften(tile);
  attend_values<Storage>(tile);
}

// m' = max(m, tile.m), and l and o as they are relative to m' plus the tile's. Where the tile has scores of -inf alone,
// the state stays as it was, unless it is empty: then it becomes the tile's, NaN and all.
template <typename A>
void absorb(const FewRowsState<A>& state, const FewRowsState<A>& tile, std::int64_t rows, std::int64_t D, A c) {
  using V = Vector<A>;
  constexpr int count = kCount<A>;
  const V minus_infinity = splat(static_cast<A>(-__builtin_inf()));
  for (std::int64_t first = 0; first < rows; first += count) {
    const std::int64_t some = rows - first < count ? rows - first : count;
    V before = V{}, own = V{};
    for (std::int64_t i = 0; i < some; ++i) before[i] = state.m[first + i], own[i] = tile.m[first + i];
    const V m = (own > before) | (own != own) ? own : before;
    V keep = exp2_of((before - m) * c), take = exp2_of((own - m) * c);
    const auto empty = before == minus_infinity, nothing = (own == minus_infinity) & (before != minus_infinity);
    take = nothing ? V{} : empty ? splat(A{1}) : take;
    keep = nothing ? splat(A{1}) : empty ? V{} : keep;
    for (std::int64_t i = 0; i < some; ++i) {
      const std::int64_t r = first + i;
      if (nothing[i]) continue;
      A* o = state.o + r * D;
      const A* added = tile.o + r * D;
      if (empty[i]) {
        __builtin_memcpy(o, added, static_cast<__SIZE_TYPE__>(D) * sizeof(A));
        state.l[r] = tile.l[r];
      } else {
        const V a = splat<A>(keep[i]), b = splat<A>(take[i]);
        for (std::int64_t d = 0; d < D; d += count) {
          store(o + d, load<V>(o + d) * a + load<V>(added + d) * b);
        }
        state.l[r] = state.l[r] * keep[i] + tile.l[r] * take[i];
      }
      state.m[r] = m[i];
    }
  }
}

}  // namespace
}  // namespace ringattn::cpu
