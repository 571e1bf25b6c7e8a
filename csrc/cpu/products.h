// The two products of a tile that both directions need: scores of keys with queries, and sums over keys.
#pragma once

#include <cstdint>

#include "cpu/micro.h"
#include "cpu/storage.h"
#include "cpu/tiles.h"

namespace ringattn::cpu {

// target[n][m] = sum_d rows[n][d] * columns[d][m], for `count` rows and kLanes columns. largest: see Product.
template <typename A>
void multiply_rows(A* target, RowSpan<const A> rows, const A* columns, std::int64_t count, std::int64_t D,
                   A* largest = nullptr) {
  micro<A>().multiply({.c = target,
                       .c_stride = kLanes,
                       .a = rows.data,
                       .a_row_stride = rows.stride,
                       .a_depth_stride = 1,
                       .b = columns,
                       .b_stride = kLanes,
                       .rows = count,
                       .depth = D,
                       .columns = kLanes,
                       .accumulate = false,
                       .largest = largest});
}

// target[d][m] += sum_n rows[n][d] * weights[n][m], for the `count` keys of a tile from pairs->first_key on. `pairs` is
// null if all pairs are visible. Weights of invisible pairs are 0, which is enough unless the rows are not finite.
// The target is multiplied by factor first, see Product; null: by nothing.
template <typename A>
void add_over_keys(A* target, RowSpan<const A> rows, const A* weights, std::int64_t count, std::int64_t D,
                   const VisiblePairs* pairs, const A* factor = nullptr) {
  const Micro<A>& kernels = micro<A>();
  if (pairs && !kernels.all_finite(rows.data, rows.stride, count, D)) {
    if (factor) kernels.scale_columns(target, D, factor);
    for (std::int32_t i = 0; i < count; ++i) {
      const std::int32_t n = pairs->first_key + i;
      kernels.add_outer(target, kLanes, rows.row(i), 1, weights + i * kLanes, D, pairs->begin[n], pairs->end[n]);
    }
    return;
  }
  kernels.multiply({.c = target,
                    .c_stride = kLanes,
                    .a = rows.data,
                    .a_row_stride = 1,
                    .a_depth_stride = rows.stride,
                    .b = weights,
                    .b_stride = kLanes,
                    .rows = D,
                    .depth = count,
                    .columns = kLanes,
                    .accumulate = true,
                    .factor = factor});
}

}  // namespace ringattn::cpu
