// dQ of one block of keys and values without atomic additions, with mma.sync: the same bits every time, for two
// products more than backward_keys.h needs. c = scale * log2(e):
//
//   s = q k^T;  p = exp2(c s - log2(e) lse);  dp = dO v^T - delta;  ds = p dp;  dQ += scale ds k
//
// A thread block owns a query tile of one head and walks over its visible key tiles; a warp owns 16 queries from the
// scores to dQ, so ds is, as it comes out of the first products, the A operand of the last. q and dO are staged once,
// k and v are copied one tile ahead.
#pragma once

#include "cuda/params.h"
#include "cuda/shapes.h"
#include "cuda/tile.h"
#include "cuda/visible_tiles.h"

namespace ringattn::cuda {

template <DType T, int kHeadDim>
struct BackwardQueries {
  static constexpr Shape kShape = shape_of(Kernel::backward_queries, kArch, kHeadDim);
  static constexpr int kQueries = kShape.queries, kKeys = kShape.keys, kThreads = kShape.threads();
  static_assert(kQueries == 16 * kShape.warps && kShape.tiles_per_warp == 1 && kShape.stages == 2);

  // Shared memory: q, dO, the stages of k and v, and the interval of visible keys of every row.
  static constexpr int kQueryTile = kTileBytes<kQueries, kHeadDim>, kKeyTile = kTileBytes<kKeys, kHeadDim>;
  static constexpr int kStage = 2 * kQueryTile, kIntervals = kStage + 4 * kKeyTile;
  static_assert(kIntervals + kQueries * 8 + kThreads * 16 == shared_bytes_of(Kernel::backward_queries, kShape, kHeadDim));

  using QueryCopy = TileCopy<kQueries, kHeadDim, kThreads>;
  using KeyCopy = TileCopy<kKeys, kHeadDim, kThreads>;
  using Scores = float[1][kKeys / 8][4];

  struct Place {
    std::int32_t tile, head, batch;

    __device__ __forceinline__ static Place of(const Params& params) {
      const std::int32_t index = block_index(), rest = index / params.query_tiles;
      const auto heads = static_cast<std::int32_t>(params.block.Hq);
      return {params.query_tiles - 1 - index % params.query_tiles, rest % heads, rest / heads};
    }
  };

  const Params& params;
  const BlockArgs& block = params.block;
  std::uint32_t shared;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float minus_lse[2], minus_delta[2];  // of the lane's rows
  float dq[1][kHeadDim / 8][4];

  __device__ __forceinline__ static char* shared_pointer() {
    extern __shared__ __align__(1024) char memory[];
    return memory;
  }

  __device__ __forceinline__ int row_of(int r) const { return warp * 16 + r * 8 + lane / 4; }

  __device__ __forceinline__ void copy_keys(const Place& place, Tile tile, int which) const {
    const std::uint32_t to = shared + kStage + which * 2 * kKeyTile + KeyCopy::lane();
    const std::int32_t first = tile.index() * kKeys, head = place.head / params.group;
    KeyCopy{}(to, KeyCopy::source(block.key, place.batch, head), block.key, first, params, block.Skv);
    KeyCopy{}(to + kKeyTile, KeyCopy::source(block.value, place.batch, head), block.value, first, params, block.Skv);
  }

  // The interval of keys that each row may see; rows past the end see none.
  __device__ __forceinline__ void store_intervals(const Place& place) const {
    auto* intervals = reinterpret_cast<int2*>(shared_pointer() + kIntervals);
    for (int row = threadIdx.x; row < kQueries; row += kThreads) {
      const std::int32_t token = place.tile * kQueries + row;
      int2 interval{0, -1};
      if (token < block.Sq) {
        const std::int32_t position = position_of(block.query_segments, token);
        interval = {block.mask.first_key(position), block.mask.last_key(position)};
      }
      intervals[row] = interval;
    }
  }

  __device__ __forceinline__ void load_statistics(const Place& place) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int32_t token = place.tile * kQueries + row_of(r);
      const std::int64_t row = (std::int64_t{place.batch} * block.Hq + place.head) * block.Sq + token;
      minus_lse[r] = token < block.Sq ? static_cast<const float*>(block.minus_lse_log2)[row] : -INFINITY;
      minus_delta[r] = token < block.Sq ? static_cast<const float*>(block.minus_delta)[row] : 0.0f;
    }
  }

  // d += a b^T for the warp's rows of a.
  __device__ __forceinline__ void multiply_rows(Scores& d, std::uint32_t a_tile, std::uint32_t b_tile) const {
    const std::uint32_t a_lane = kept(a_tile + warp * 16 * kRowBytes + tall_lane(lane));
    const std::uint32_t b_lane = kept(b_tile + wide_lane(lane));
    unrolled<kHeadDim / 16>([&]<int step>() {
      std::uint32_t a[1][4];
      load_a<kQueries, 16 * step>(a, a_lane);
      unrolled<kKeys / 16>([&]<int n>() {
        std::uint32_t b[4];
        load_matrices<fragment_offset<kKeys>(16 * n, 16 * step)>(b, b_lane ^ fragment_flip(16 * step));
        multiply_pair<T>(d, 2 * n, a, b);
      });
    });
  }

  // Scores of keys that a row does not see become -inf.
  __device__ __forceinline__ void apply_mask(Scores& s, std::int32_t first_key) const {
    const auto* intervals = reinterpret_cast<const int2*>(shared_pointer() + kIntervals);
    const int2 interval[2] = {intervals[row_of(0)], intervals[row_of(1)]};
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const std::int32_t key = first_key + n * 8 + lane % 4 * 2 + i;
        const std::int32_t position = key < block.Skv ? position_of(block.key_segments, key) : Mask::kUnbounded;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (position < interval[r].x || position > interval[r].y) s[0][n][2 * r + i] = -INFINITY;
        }
      }
    }
  }

  __device__ __forceinline__ void absorb(Tile tile, int which) {
    const std::uint32_t k = shared + kStage + which * 2 * kKeyTile;
    Scores s, ds;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[0][n][i] = 0.0f;
        ds[0][n][i] = minus_delta[i / 2];
      }
    }
    multiply_rows(s, shared, k);
    if (!tile.is_full()) apply_mask(s, tile.index() * kKeys);
    multiply_rows(ds, shared + kQueryTile, k + kKeyTile);
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) ds[0][n][i] *= exp2_approx(fmaf(s[0][n][i], params.scale_log2, minus_lse[i / 2]));
    }
    const std::uint32_t b_lane = kept(k + tall_lane(lane));
    unrolled<kKeys / 16>([&]<int step>() {
      std::uint32_t a[1][4];
      pack_a<T>(a, ds, step);
      unrolled<kHeadDim / 16>([&]<int n>() {
        std::uint32_t b[4];
        load_matrices_transposed<fragment_offset<kKeys>(16 * step, 16 * n)>(b, b_lane ^ fragment_flip(16 * n));
        multiply_pair<T>(dq, 2 * n, a, b);
      });
    });
  }

  // Nobody else touches these rows of the accumulator.
  __device__ __forceinline__ void add_to_memory(const Place& place) const {
    const Rows& rows = block.grad_query;
    const auto scale = static_cast<float>(block.scale);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int32_t token = place.tile * kQueries + row_of(r);
      if (token >= block.Sq) continue;
      float* to = static_cast<float*>(rows.data) + place.batch * rows.batch_stride + place.head * rows.head_stride +
                  token * rows.token_stride + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        if (n * 8 >= block.D) break;
        auto* pair = reinterpret_cast<float2*>(to + n * 8);
        const float2 sum = *pair;
        *pair = {fmaf(dq[0][n][2 * r], scale, sum.x), fmaf(dq[0][n][2 * r + 1], scale, sum.y)};
      }
    }
  }

  __device__ __forceinline__ void run() {
    const Place place = Place::of(params);
    VisibleTiles<true, kQueries, kKeys> walk(block, place.tile);
    Tile now = walk.next();
    if (!now.exists()) return;

    const std::int32_t first = place.tile * kQueries;
    const std::uint32_t to = shared + QueryCopy::lane();
    QueryCopy{}(to, QueryCopy::source(block.query, place.batch, place.head), block.query, first, params, block.Sq);
    QueryCopy{}(to + kQueryTile, QueryCopy::source(block.grad_out, place.batch, place.head), block.grad_out, first,
                params, block.Sq);
    copy_keys(place, now, 0);
    commit_copies();
    store_intervals(place);
    load_statistics(place);
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dq[0][n][i] = 0.0f;
    }
    int which = 0;
    while (now.exists()) {
      const Tile next = walk.next();
      wait_copies<0>();
      __syncthreads();  // this key tile has landed everywhere; the previous one has been read by all
      if (next.exists()) copy_keys(place, next, which ^ 1);
      commit_copies();
      absorb(now, which);
      which ^= 1;
      now = next;
    }
    add_to_memory(place);
  }
};

template <DType T, int kHeadDim>
__device__ __forceinline__ void backward_queries(const Params& params) {
  BackwardQueries<T, kHeadDim> kernel{params, params.block,
                                      shared_address(BackwardQueries<T, kHeadDim>::shared_pointer())};
  kernel.run();
}

}  // namespace ringattn::cuda
