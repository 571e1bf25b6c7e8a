// Backward for one block of keys and values, with mma.sync, keys outside and queries inside: adds to dK and dV, and, if
// the caller does not ask for the same bits every time, to dQ. c = scale * log2(e):
//
//   s^T = k q^T;  p^T = exp2(c s^T - log2(e) lse);  dp^T = v dO^T - delta;  ds^T = p^T dp^T
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

  // Shared memory: k, v, the stages (q, dO, -lse log2(e), -delta), ds and p where they are
  // needed, and pointers.
  static constexpr int kQueryTile = kTileBytes<kQueries, kHeadDim>, kKeyTile = kTileBytes<kKeys, kHeadDim>;
  static constexpr int kStatistics = 2 * kQueryTile, kStage = kStatistics + 1024;
  static constexpr int kProduct = kTileBytes<kKeys, kQueries < kPanelColumns ? kPanelColumns : kQueries>;
  static constexpr int kFirstStage = 2 * kKeyTile;
  static constexpr int kDs = kFirstStage + kStages * kStage, kP = kDs + kProduct;

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
  int key_row = warp / kColumnWarps * 16;  // the first of the warp's keys
  int column_part = warp % kColumnWarps;   // its part of the columns, and of the queries of the scores
  std::uint32_t tall = kept(shared + tall_lane(lane)), wide = kept(shared + wide_lane(lane));
  Gradient dk, dv;

  __device__ __forceinline__ static char* shared_pointer() {
    extern __shared__ __align__(1024) char memory[];
    return memory;
  }

  __device__ __forceinline__ bool adds_queries() const { return block.grad_query.data != nullptr; }

  // Where this thread starts to read q (0), dO (1) and the statistics (2) of the query head in hand.
  __device__ __forceinline__ const char*& source_of(int which) const {
    const int products = kShares ? 2 * kProduct : adds_queries() ? kProduct : 0;
    return pointer_slot<kThreads>(shared_pointer() + kDs + products, which);
  }

  __device__ __forceinline__ void set_sources(const Place& place, std::int32_t head_in_group) const {
    const std::int32_t head = place.head * params.group + head_in_group;
    source_of(0) = QueryCopy::source(block.query, place.batch, head);
    source_of(1) = QueryCopy::source(block.grad_out, place.batch, head);
    const std::int64_t row = (std::int64_t{place.batch} * block.Hq + head) * block.Sq + threadIdx.x;
    source_of(2) = static_cast<const char*>(block.minus_lse_log2) + 4 * row;
  }

  __device__ __forceinline__ void copy_queries(Tile tile, int stage) const {
    const std::int32_t first = tile.index() * kQueries;
    const std::uint32_t to = kept(shared + kFirstStage + stage + QueryCopy::lane());
    QueryCopy{}(to, source_of(0), block.query, first, params, block.Sq);
    QueryCopy{}(to + kQueryTile, source_of(1), block.grad_out, first, params, block.Sq);
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    if (thread < kQueries) {
      const bool inside = first + thread < block.Sq;
      const char* lse = source_of(2) + (inside ? std::int64_t{4} * first : 0);
      const std::int64_t to_delta =
          static_cast<const char*>(block.minus_delta) - static_cast<const char*>(block.minus_lse_log2);
      const std::uint32_t statistic = shared + kFirstStage + stage + kStatistics + thread * 4;
      copy_async_4_or_zero<0>(statistic, lse, inside);
      copy_async_4_or_zero<kQueries * 4>(statistic, lse + to_delta, inside);
    }
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

  // p^T and ds^T of the warp's keys and queries. q: the stage.
  __device__ __forceinline__ void make_products(Scores& p, Scores& ds, Tile tile, int stage,
                                                const int2 (&interval)[2]) const {
    const std::uint32_t statistic =
        kept(shared + kFirstStage + stage + (column_part * kScoreQueries + lane % 4 * 2) * 4);
    unrolled<kScoreQueries / 8>([&]<int n>() {
      const float2 minus_delta = load_shared_float2<kStatistics + kQueries * 4 + n * 32>(statistic);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        p[0][n][2 * r] = p[0][n][2 * r + 1] = 0.0f;
        ds[0][n][2 * r] = minus_delta.x;
        ds[0][n][2 * r + 1] = minus_delta.y;
      }
    });
    const std::uint32_t k = kept(tall + key_row * kRowBytes);
    const std::uint32_t q = kept(wide + stage + column_part * kScoreQueries * kRowBytes);
    unrolled<kHeadDim / 16>([&]<int d>() {
      std::uint32_t a[2][1][4];
      load_matrices<fragment_offset<kKeys>(0, 16 * d)>(a[0][0], k ^ fragment_flip(16 * d));
      load_matrices<kKeyTile + fragment_offset<kKeys>(0, 16 * d)>(a[1][0], k ^ fragment_flip(16 * d));
      unrolled<kScoreQueries / 16>([&]<int n>() {
        constexpr int kOffset = kFirstStage + fragment_offset<kQueries>(16 * n, 16 * d);
        std::uint32_t b[4];
        load_matrices<kOffset>(b, q ^ fragment_flip(16 * d));
        multiply_pair<T>(p, 2 * n, a[0], b);
        load_matrices<kOffset + kQueryTile>(b, q ^ fragment_flip(16 * d));
        multiply_pair<T>(ds, 2 * n, a[1], b);
      });
    });
    if (!tile.is_full()) apply_mask(p, tile.index() * kQueries + column_part * kScoreQueries, interval);
    unrolled<kScoreQueries / 8>([&]<int n>() {
      const float2 minus_lse = load_shared_float2<kStatistics + n * 32>(statistic);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        p[0][n][2 * r] = exp2_approx(fmaf(p[0][n][2 * r], params.scale_log2, minus_lse.x));
        p[0][n][2 * r + 1] = exp2_approx(fmaf(p[0][n][2 * r + 1], params.scale_log2, minus_lse.y));
        ds[0][n][2 * r] *= p[0][n][2 * r];
        ds[0][n][2 * r + 1] *= p[0][n][2 * r + 1];
      }
    });
  }

  // Rounds x and stores it as [key][query].
  template <int kTile>
  __device__ __forceinline__ void store_product(const Scores& x) const {
    const std::uint32_t at =
        kept((shared + pair_at(key_row + lane / 4)) ^ static_cast<std::uint32_t>(column_part * kScoreQueries * 2));
    unrolled<kScoreQueries / 8>([&]<int n>() {
      store_shared_4<kTile>(at ^ fragment_flip(8 * n), pack<T>(x[0][n][0], x[0][n][1]));
      store_shared_4<kTile + 8 * kRowBytes>(at ^ fragment_flip(8 * n), pack<T>(x[0][n][2], x[0][n][3]));
    });
  }

  // dV += p^T dO; dK += ds^T q. load_p and load_ds give the A fragments of 16 queries.
  template <typename LoadP, typename LoadDs>
  __device__ __forceinline__ void add_products(int stage, const LoadP& load_p, const LoadDs& load_ds) {
    const std::uint32_t q = kept(tall + stage + column_part * (kColumns / kPanelColumns) * kQueries * kRowBytes);
    unrolled<kQueries / 16>([&]<int step>() {
      std::uint32_t a[2][1][4];
      load_p.template operator()<step>(a[0]);
      load_ds.template operator()<step>(a[1]);
      unrolled<kColumns / 16>([&]<int n>() {
        constexpr int kOffset = kFirstStage + fragment_offset<kQueries>(16 * step, 16 * n);
        std::uint32_t b[4];
        load_matrices_transposed<kOffset + kQueryTile>(b, q ^ fragment_flip(16 * n));
        multiply_pair<T>(dv, 2 * n, a[0], b);
        load_matrices_transposed<kOffset>(b, q ^ fragment_flip(16 * n));
        multiply_pair<T>(dk, 2 * n, a[1], b);
      });
    });
  }

  // dQ += scale ds k for the query tile; a warp makes 16 queries of it and some columns, kPart of them at a time.
  __device__ __forceinline__ void add_query_gradient(const Place& place, Step step) const {
    constexpr int kRowTiles = kQueries / 16, kPart = kQueryColumns < 64 ? kQueryColumns : 64;
    const int row = warp % kRowTiles * 16, first_column = warp / kRowTiles * kQueryColumns;
    const std::uint32_t a_lane = kept(wide ^ static_cast<std::uint32_t>(row * 2));
    const std::uint32_t b_lane = kept((tall + first_column / kPanelColumns * kKeys * kRowBytes) ^
                                      static_cast<std::uint32_t>(first_column % kPanelColumns * 2));
    const Rows& rows = block.grad_query;
    const std::int32_t token = step.tile.index() * kQueries + row + lane / 4;
    float* to = static_cast<float*>(rows.data) + place.batch * rows.batch_stride +
                (place.head * params.group + step.head) * rows.head_stride + token * rows.token_stride + first_column +
                lane % 4 * 2;
    const auto scale = static_cast<float>(block.scale);
    unrolled<kQueryColumns / kPart>([&]<int part>() {
      float dq[1][kPart / 8][4] = {};
      unrolled<kKeys / 16>([&]<int k>() {
        std::uint32_t a[1][4];
        load_matrices_transposed<kDs + 16 * k * kRowBytes>(a[0], a_lane);
        unrolled<kPart / 16>([&]<int n>() {
          std::uint32_t b[4];
          load_matrices_transposed<fragment_offset<kKeys>(16 * k, part * kPart + 16 * n)>(b,
                                                                                        b_lane ^ fragment_flip(16 * n));
          multiply_pair<T>(dq, 2 * n, a, b);
        });
      });
      const auto left = static_cast<int>(block.D) - first_column - part * kPart;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (token + 8 * r >= block.Sq) continue;
        float* row_to = to + 8 * r * rows.token_stride;
        unrolled<kPart / 8>([&]<int n>() {
          if (left < kPart && 8 * n >= left) return;
          add_global<(part * kPart + 8 * n) * 4>(row_to, dq[0][n][2 * r] * scale);
          add_global<(part * kPart + 8 * n) * 4 + 4>(row_to, dq[0][n][2 * r + 1] * scale);
        });
      }
    });
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

  __device__ __forceinline__ void compute(const Place& place, Step step, int stage, const int2 (&interval)[2]) {
    Scores p, ds;
    make_products(p, ds, step.tile, stage, interval);
    if constexpr (kShares) store_product<kP>(p);
    if (kShares || adds_queries()) store_product<kDs>(ds);
    if constexpr (kShares) {
      __syncthreads();  // p and ds are complete
      const std::uint32_t lane_of_a = kept(tall + key_row * kRowBytes);
      const auto load = [&]<int kTile, int k>(std::uint32_t (&a)[1][4]) {
        load_matrices<kTile>(a[0], lane_of_a ^ fragment_flip(16 * k));
      };
      add_products(
          stage, [&]<int k>(std::uint32_t (&a)[1][4]) { load.template operator()<kP, k>(a); },
          [&]<int k>(std::uint32_t (&a)[1][4]) { load.template operator()<kDs, k>(a); });
    } else {
      add_products(
          stage, [&]<int k>(std::uint32_t (&a)[1][4]) { pack_a<T>(a, p, k); },
          [&]<int k>(std::uint32_t (&a)[1][4]) { pack_a<T>(a, ds, k); });
      if (adds_queries()) __syncthreads();  // ds is complete
    }
    if (adds_queries()) add_query_gradient(place, step);
  }

  __device__ __forceinline__ void run() {
    const Place place = Place::of(params);
    VisibleTiles<false, kQueries, kKeys> walk(block, place.tile);
    Step now{walk.next(), 0};
    if (!now.tile.exists()) return;

    KeyCopy{}(shared + KeyCopy::lane(), KeyCopy::source(block.key, place.batch, place.head), block.key,
              place.tile * kKeys, params, block.Skv);
    KeyCopy{}(shared + kKeyTile + KeyCopy::lane(), KeyCopy::source(block.value, place.batch, place.head), block.value,
              place.tile * kKeys, params, block.Skv);
    set_sources(place, 0);
    copy_queries(now.tile, 0);
    commit_copies();
    int2 interval[2];
    find_intervals(place, interval);
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dk[0][n][i] = dv[0][n][i] = 0.0f;
    }
    int stage = 0;
    while (now.tile.exists()) {
      Step next{walk.next(), now.head};
      if (!next.tile.exists() && next.head + 1 < params.group) {
        walk.restart();
        next = {walk.next(), next.head + 1};
        set_sources(place, next.head);
      }
      wait_copies<0>();
      __syncthreads();  // this query tile has landed everywhere; the previous one has been read by all
      if constexpr (kStages == 2) {
        if (next.tile.exists()) copy_queries(next.tile, kStage - stage);
        commit_copies();
      }
      compute(place, now, stage, interval);
      if constexpr (kStages == 1) {
        __syncthreads();
        if (next.tile.exists()) copy_queries(next.tile, 0);
        commit_copies();
      } else {
        stage = kStage - stage;
      }
      now = next;
    }
    add_to_memory(block.grad_key, place, dk, static_cast<float>(block.scale));
    add_to_memory(block.grad_value, place, dv, 1.0f);
  }
};

template <DType T, int kHeadDim>
__device__ __forceinline__ void backward_keys(const Params& params) {
  BackwardKeys<T, kHeadDim> kernel{params, params.block, shared_address(BackwardKeys<T, kHeadDim>::shared_pointer())};
  kernel.run();
}

}  // namespace ringattn::cuda
