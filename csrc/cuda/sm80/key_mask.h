// The mask of a query tile: the interval of keys that each row may see, in shared memory, and its use on scores. For
// the kernels whose rows are queries; tiles that are wholly visible never come here.
#pragma once

#include "cuda/params.h"
#include "cuda/visible_tiles.h"

namespace ringattn::cuda {

// Rows past the end see none.
template <int kQueries, int kThreads>
__device__ __forceinline__ void store_intervals(int2* intervals, const BlockArgs& block, std::int32_t query_tile) {
  for (int row = threadIdx.x; row < kQueries; row += kThreads) {
    const std::int32_t token = query_tile * kQueries + row;
    int2 interval{0, -1};
    if (token < block.Sq) {
      const std::int32_t position = position_of(block.query_segments, token);
      interval = {block.mask.first_key(position), block.mask.last_key(position)};
    }
    intervals[row] = interval;
  }
}

// Scores of keys that a row does not see become -inf. first_row: the first of the warp's rows in the tile.
template <int kTiles, int kColumns>
__device__ __forceinline__ void mask_keys(float (&s)[kTiles][kColumns][4], const int2* intervals, int first_row,
                                          const BlockArgs& block, std::int32_t first_key) {
  const int lane = threadIdx.x % 32;
  int2 interval[2 * kTiles];
#pragma unroll
  for (int r = 0; r < 2 * kTiles; ++r) interval[r] = intervals[first_row + r * 8 + lane / 4];
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int32_t key = first_key + n * 8 + lane % 4 * 2 + i;
      const std::int32_t position = key < block.Skv ? position_of(block.key_segments, key) : Mask::kUnbounded;
#pragma unroll
      for (int r = 0; r < 2 * kTiles; ++r) {
        if (position < interval[r].x || position > interval[r].y) s[r / 2][n][r % 2 * 2 + i] = -INFINITY;
      }
    }
  }
}

}  // namespace ringattn::cuda
