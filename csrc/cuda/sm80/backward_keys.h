// Backward for one block of keys and values, with mma.sync, keys outside and queries inside: adds to dK and dV, and, if
// the caller does not ask for the same bits every time, to dQ. c = scale * log2(e):
//
//   s^T = k q^T;  p^T = exp2(c s^T - lse_log2);  dp^T = v dO^T - delta;  ds^T = p^T dp^T
//   dV += p^T dO;  dK += scale ds^T q;  dQ += scale ds k
//
// A thread block owns a key tile of one key head and walks over the query heads that share it and their visible query
// tiles. A warp owns 16 keys, so p^T and ds^T are, as they come out of the first products, the A operands of dV and dK,
// which stay in registers to the end. Where the head is too wide for that (head_dim 256), column_warps warps share the
// 16 keys: each makes its part of p^T and ds^T, all read the whole from shared memory, each owns its columns.
//
// dQ mixes all keys of the tile, so ds passes through shared memory, and its sums meet those of other thread blocks in
// memory by atomic additions. backward_queries.h is the way without.
#pragma once

#include "cuda/params.h"
#include "cuda/shapes.h"
#include "cuda/tile.h"
#include "cuda/visible_tiles.h"

namespace ringattn::cuda {

template <DType T, int kHeadDim>
struct BackwardKeys {
  static constexpr Shape kShape = shape_of(Kernel::backward_keys, kArch, kHeadDim);
  static constexpr int kQueries = kShape.queries, kKeys = kShape.keys, kThreads = kShape.threads();
  static constexpr int kColumnWarps = kShape.column_warps, kStages = kShape.stages;
  static constexpr int kColumns = kHeadDim / kColumnWarps;        // of dK and dV that a warp owns
  static constexpr int kScoreQueries = kQueries / kColumnWarps;   // whose scores a warp makes
  static constexpr bool kShares = kColumnWarps > 1;
  static_assert(kQueries <= kPanelColumns && kScoreQueries % 16 == 0);
  static_assert(kKeys == 16 * kShape.warps / kColumnWarps && kShape.tiles_per_warp == 1);

  // dQ of a query tile: a warp makes 16 queries and kQueryColumns columns.
  static constexpr int kQueryColumns = kHeadDim * kQueries / 16 / kShape.warps;

  // Shared memory. A stage: q, dO, lse_log2, delta.
  static constexpr int kQueryTile = kTileBytes<kQueries, kHeadDim>, kKeyTile = kTileBytes<kKeys, kHeadDim>;
  static constexpr int kProduct = kTileBytes<kKeys, kQueries < kPanelColumns ? kPanelColumns : kQueries>;
  static constexpr int kValue = kKeyTile, kDs = kValue + kKeyTile;
  static constexpr int kP = kDs + kProduct;  // only where warps share rows

  using QueryCopy = TileCopy<kQueries, kHeadDim, kThreads>;
  using KeyCopy = TileCopy<kKeys, kHeadDim, kThreads>;
  using Scores = float[1][kScoreQueries / 8][4];
  using Gradient = float[1][kColumns / 8][4];

  struct Place {
    std::int32_t tile, head, batch;

    __device__ __forceinline__ static Place of(const Params& params) {
      const std::int32_t index = block_index(), rest = index / params.key_tiles;
      const auto heads = static_cast<std::int32_t>(params.block.Hkv);
      return {index % params.key_tiles, rest % heads, rest / heads};
    }
  };

  // A query tile of one of the heads that share the key head.
  struct Step {
    Tile tile;
    std::int32_t head;  // within the group
  };

  const Params& params;
  const BlockArgs& block = params.block;
  std::uint32_t shared;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int key_row = warp / kColumnWarps * 16;    // the first of the warp's keys
  int column_part = warp % kColumnWarps;     // its part of the columns, and of the queries of the scores
  Gradient dk, dv;

  __device__ __forceinline__ bool adds_queries() const { return block.grad_query.data != nullptr; }

  // Where the stages start: behind what is there of ds and p.
  __device__ __forceinline__ std::uint32_t stage(int which) const {
    const int products = kShares ? 2 * kProduct : adds_queries() ? kProduct : 0;
    return shared + kDs + products + which * 2 * kQueryTile;
  }
  __device__ __forceinline__ std::uint32_t statistics(int which) const { return stage(kStages) + which * kQueries * 8; }

  __device__ __forceinline__ void copy_queries(const Place& place, Step step, int which) const {
    const std::int32_t head = place.head * params.group + step.head, first = step.tile.index() * kQueries;
    const std::uint32_t to = stage(which) + QueryCopy::lane();
    QueryCopy{}(to, QueryCopy::source(block.query, place.batch, head), block.query, first, params, block.Sq);
    QueryCopy{}(to + kQueryTile, QueryCopy::source(block.grad_out, place.batch, head), block.grad_out, first, params,
                block.Sq);
    if (threadIdx.x < kQueries) {
      const std::int64_t row = (std::int64_t{place.batch} * block.Hq + head) * block.Sq;
      const bool inside = first + threadIdx.x < block.Sq;
      const std::int64_t at = row + (inside ? first + threadIdx.x : 0);
      const std::uint32_t statistic = statistics(which) + threadIdx.x * 4;
      copy_async_4_or_zero(statistic, static_cast<const float*>(block.lse_log2) + at, inside);
      copy_async_4_or_zero(statistic + kQueries * 4, static_cast<const float*>(block.delta) + at, inside);
    }
  }

  // d = a b^T for the warp's keys, rows of `a`, and its queries, rows of `b`.
  __device__ __forceinline__ void multiply_rows(Scores& d, std::uint32_t a_tile, std::uint32_t b_tile) const {
    const std::uint32_t a_lane = kept(a_tile + key_row * kRowBytes + tall_lane(lane));
    const std::uint32_t b_lane = kept(b_tile + column_part * kScoreQueries * kRowBytes + wide_lane(lane));
    unrolled<kHeadDim / 16>([&]<int step>() {
      std::uint32_t a[1][4];
      load_a<kKeys, 16 * step>(a, a_lane);
      unrolled<kScoreQueries / 16>([&]<int n>() {
        std::uint32_t b[4];
        load_matrices<fragment_offset<kQueries>(16 * n, 16 * step)>(b, b_lane ^ fragment_flip(16 * step));
        multiply_pair<T>(d, 2 * n, a, b);
      });
    });
  }

  // The queries that see each of the lane's keys; keys past the end are seen by none.
  __device__ __forceinline__ void find_intervals(const Place& place, int2 (&interval)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int32_t key = place.tile * kKeys + key_row + r * 8 + lane / 4;
      interval[r] = {0, -1};
      if (key < block.Skv) {
        const std::int32_t position = position_of(block.key_segments, key);
        interval[r] = {block.mask.first_query(position), block.mask.last_query(position)};
      }
    }
  }

  // Scores of queries that do not see the key become -inf.
  __device__ __forceinline__ void apply_mask(Scores& s, std::int32_t first_query, const int2 (&interval)[2]) const {
#pragma unroll
    for (int n = 0; n < kScoreQueries / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const std::int32_t query = first_query + n * 8 + lane % 4 * 2 + i;
        const std::int32_t position = query < block.Sq ? position_of(block.query_segments, query) : -1;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (position < interval[r].x || position > interval[r].y) s[0][n][2 * r + i] = -INFINITY;
        }
      }
    }
  }

  // p^T and ds^T of the warp's keys and queries.
  __device__ __forceinline__ void make_products(Scores& p, Scores& ds, Step step, int which,
                                                const int2 (&interval)[2]) const {
    const std::uint32_t statistic = statistics(which) + (column_part * kScoreQueries + lane % 4 * 2) * 4;
    unrolled<kScoreQueries / 8>([&]<int n>() {
      const float2 delta = load_shared_float2<kQueries * 4 + n * 32>(statistic);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        p[0][n][2 * r] = p[0][n][2 * r + 1] = 0.0f;
        ds[0][n][2 * r] = -delta.x;
        ds[0][n][2 * r + 1] = -delta.y;
      }
    });
    multiply_rows(p, shared, stage(which));
    if (!step.tile.is_full()) {
      apply_mask(p, step.tile.index() * kQueries + column_part * kScoreQueries, interval);
    }
    multiply_rows(ds, shared + kValue, stage(which) + kQueryTile);
    unrolled<kScoreQueries / 8>([&]<int n>() {
      const float2 lse = load_shared_float2<n * 32>(statistic);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        p[0][n][2 * r] = exp2_approx(fmaf(p[0][n][2 * r], params.scale_log2, -lse.x));
        p[0][n][2 * r + 1] = exp2_approx(fmaf(p[0][n][2 * r + 1], params.scale_log2, -lse.y));
        ds[0][n][2 * r] *= p[0][n][2 * r];
        ds[0][n][2 * r + 1] *= p[0][n][2 * r + 1];
      }
    });
  }

  // Rounds x and stores it as [key][query].
  __device__ __forceinline__ void store_product(const Scores& x, std::uint32_t product) const {
    const std::uint32_t at = kept(product + pair_at(key_row + lane / 4));
    unrolled<kScoreQueries / 8>([&]<int n>() {
      const std::uint32_t to = at ^ static_cast<std::uint32_t>((column_part * kScoreQueries + 8 * n) * 2);
      store_shared_4<0>(to, pack<T>(x[0][n][0], x[0][n][1]));
      store_shared_4<8 * kRowBytes>(to, pack<T>(x[0][n][2], x[0][n][3]));
    });
  }

  // d += x rows, where x is p^T or ds^T, and rows is dO or q.
  template <typename LoadA>
  __device__ __forceinline__ void add_product(Gradient& d, std::uint32_t rows, const LoadA& load) const {
    const std::uint32_t columns = column_part * (kColumns / kPanelColumns) * kQueries * kRowBytes;
    const std::uint32_t b_lane = kept(rows + columns + tall_lane(lane));
    unrolled<kQueries / 16>([&]<int step>() {
      std::uint32_t a[1][4];
      load.template operator()<step>(a);
      unrolled<kColumns / 16>([&]<int n>() {
        std::uint32_t b[4];
        load_matrices_transposed<fragment_offset<kQueries>(16 * step, 16 * n)>(b, b_lane ^ fragment_flip(16 * n));
        multiply_pair<T>(d, 2 * n, a, b);
      });
    });
  }

  // dQ += scale ds k for the query tile.
  __device__ __forceinline__ void add_query_gradient(const Place& place, Step step) const {
    constexpr int kRowTiles = kQueries / 16;
    const int row = warp % kRowTiles * 16, column = warp / kRowTiles * kQueryColumns;
    float dq[1][kQueryColumns / 8][4] = {};
    const std::uint32_t a_lane = kept((shared + kDs + wide_lane(lane)) ^ static_cast<std::uint32_t>(row * 2));
    const std::uint32_t b_lane =
        kept((shared + column / kPanelColumns * kKeys * kRowBytes + tall_lane(lane)) ^
             static_cast<std::uint32_t>(column % kPanelColumns * 2));
    unrolled<kKeys / 16>([&]<int k>() {
      std::uint32_t a[1][4];
      load_matrices_transposed<16 * k * kRowBytes>(a[0], a_lane);
      unrolled<kQueryColumns / 16>([&]<int n>() {
        std::uint32_t b[4];
        load_matrices_transposed<fragment_offset<kKeys>(16 * k, 16 * n)>(b, b_lane ^ fragment_flip(16 * n));
        multiply_pair<T>(dq, 2 * n, a, b);
      });
    });
    const Rows& rows = block.grad_query;
    const auto scale = static_cast<float>(block.scale);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int32_t token = step.tile.index() * kQueries + row + r * 8 + lane / 4;
      if (token >= block.Sq) continue;
      float* to = static_cast<float*>(rows.data) + place.batch * rows.batch_stride +
                  (place.head * params.group + step.head) * rows.head_stride + token * rows.token_stride + column +
                  lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kQueryColumns / 8; ++n) {
        if (column + n * 8 >= block.D) break;
        add_global(to + n * 8, dq[0][n][2 * r] * scale);
        add_global(to + n * 8 + 1, dq[0][n][2 * r + 1] * scale);
      }
    }
  }

  // The accumulator of the keys gains d times factor. Nobody else touches these rows.
  __device__ __forceinline__ void add_to_memory(const Rows& rows, const Place& place, const Gradient& d,
                                                float factor) const {
    if (rows.data == nullptr) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int32_t token = place.tile * kKeys + key_row + r * 8 + lane / 4;
      if (token >= block.Skv) continue;
      float* to = static_cast<float*>(rows.data) + place.batch * rows.batch_stride + place.head * rows.head_stride +
                  token * rows.token_stride + column_part * kColumns + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        if (column_part * kColumns + n * 8 >= block.D) break;
        auto* pair = reinterpret_cast<float2*>(to + n * 8);
        const float2 sum = *pair;
        *pair = {fmaf(d[0][n][2 * r], factor, sum.x), fmaf(d[0][n][2 * r + 1], factor, sum.y)};
      }
    }
  }

  __device__ __forceinline__ void compute(const Place& place, Step step, int which, const int2 (&interval)[2]) {
    Scores p, ds;
    make_products(p, ds, step, which, interval);
    if constexpr (kShares) store_product(p, shared + kP);
    if (kShares || adds_queries()) store_product(ds, shared + kDs);
    if constexpr (kShares) {
      __syncthreads();  // p and ds are complete
      const std::uint32_t a_lane = kept(shared + kDs + key_row * kRowBytes + tall_lane(lane));
      add_product(dv, stage(which) + kQueryTile, [&]<int k>(std::uint32_t (&a)[1][4]) {
        load_matrices<kProduct>(a[0], a_lane ^ fragment_flip(16 * k));
      });
      add_product(dk, stage(which), [&]<int k>(std::uint32_t (&a)[1][4]) {
        load_matrices<0>(a[0], a_lane ^ fragment_flip(16 * k));
      });
    } else {
      add_product(dv, stage(which) + kQueryTile, [&]<int k>(std::uint32_t (&a)[1][4]) { pack_a<T>(a, p, k); });
      add_product(dk, stage(which), [&]<int k>(std::uint32_t (&a)[1][4]) { pack_a<T>(a, ds, k); });
      if (adds_queries()) __syncthreads();  // ds is complete
    }
    if (adds_queries()) add_query_gradient(place, step);
  }

  __device__ __forceinline__ void run() {
    const Place place = Place::of(params);
    VisibleTiles<false, kQueries, kKeys> walk(block, place.tile);
    const auto advance = [&](std::int32_t head) -> Step {
      Tile tile = walk.next();
      if (!tile.exists() && head + 1 < params.group) {
        ++head;
        walk.restart();
        tile = walk.next();
      }
      return {tile, head};
    };
    Step now = advance(0);
    if (!now.tile.exists()) return;

    KeyCopy{}(shared + KeyCopy::lane(), KeyCopy::source(block.key, place.batch, place.head), block.key,
              place.tile * kKeys, params, block.Skv);
    KeyCopy{}(shared + kValue + KeyCopy::lane(), KeyCopy::source(block.value, place.batch, place.head), block.value,
              place.tile * kKeys, params, block.Skv);
    copy_queries(place, now, 0);
    commit_copies();
    int2 interval[2];
    find_intervals(place, interval);
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dk[0][n][i] = dv[0][n][i] = 0.0f;
    }
    int which = 0;
    while (now.tile.exists()) {
      const Step next = advance(now.head);
      wait_copies<0>();
      __syncthreads();  // this query tile has landed everywhere; the previous one has been read by all
      if constexpr (kStages == 2) {
        if (next.tile.exists()) copy_queries(place, next, which ^ 1);
        commit_copies();
      }
      compute(place, now, which, interval);
      if constexpr (kStages == 1) {
        __syncthreads();
        if (next.tile.exists()) copy_queries(place, next, 0);
        commit_copies();
      } else {
        which ^= 1;
      }
      now = next;
    }
    add_to_memory(block.grad_key, place, dk, static_cast<float>(block.scale));
    add_to_memory(block.grad_value, place, dv, 1.0f);
  }
};

template <DType T, int kHeadDim>
__device__ __forceinline__ void backward_keys(const Params& params) {
  extern __shared__ __align__(1024) char memory[];
  BackwardKeys<T, kHeadDim> kernel{params, params.block, shared_address(memory)};
  kernel.run();
}

}  // namespace ringattn::cuda
