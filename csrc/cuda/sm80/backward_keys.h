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
  static constexpr int kColumns = kHeadDim / kColumnWarps;     // of dK and dV that a warp owns
  static constexpr int kOwnQueries = kQueries / kColumnWarps;  // whose scores a warp makes
  static constexpr int kScoreQueries = kShape.score_columns;   // of them at a time
  static constexpr bool kShares = kColumnWarps > 1;
  static_assert(kQueries <= kPanelColumns && kScoreQueries % 16 == 0 && kOwnQueries % kScoreQueries == 0);
  static_assert(kKeys == 16 * kShape.warps / kColumnWarps && kShape.tiles_per_warp == 1);

  // Shared memory: k, v, the stages (q, dO, -lse log2(e), -delta), ds and p where they are needed, and pointers.
  static constexpr int kQueryTile = kTileBytes<kQueries, kHeadDim>, kKeyTile = kTileBytes<kKeys, kHeadDim>;
  static constexpr int kStatistics = 2 * kQueryTile, kStage = kStatistics + 1024;
  static constexpr int kProduct = kTileBytes<kKeys, kPanelColumns>;
  static constexpr int kFirstStage = 2 * kKeyTile;
  static constexpr int kDs = kFirstStage + kStages * kStage, kP = kDs + kProduct;

  // The pointers lie behind the products that there are.
  static constexpr int kPointers = kDs + (kShares ? 2 * kProduct : 0);
  static constexpr int kPointersBehindDs = kDs + (kShares ? 2 : 1) * kProduct;
  static_assert(kPointers + kThreads * 32 == shared_bytes_of(Kernel::backward_keys, kShape, kHeadDim, false));
  static_assert(kPointersBehindDs + kThreads * 32 == shared_bytes_of(Kernel::backward_keys, kShape, kHeadDim, true));

  using QueryCopy = TileCopy<kQueries, kHeadDim, kThreads>;
  using KeyCopy = TileCopy<kKeys, kHeadDim, kThreads>;
  using Scores = float[1][kScoreQueries / 8][4];
  using Products = std::uint32_t[kScoreQueries / 16][1][4];
  using Gradient = float[1][kColumns / 8][4];

  struct Place {
    std::int32_t tile, head, batch;

    __device__ __forceinline__ static Place of(const Params& params) {
      const std::int32_t index = block_index(), rest = index / params.key_tiles;
      const auto heads = static_cast<std::int32_t>(params.block.Hkv);
      return {index % params.key_tiles, rest % heads, rest / heads};
    }
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

  // Where this thread starts to read q (0), dO (1) and the statistics (2) and to add to dQ (3) of a query head.
  __device__ __forceinline__ const char*& source_of(int which) const {
    return pointer_slot<kThreads>(shared_pointer() + (adds_queries() ? kPointersBehindDs : kPointers), which);
  }

  __device__ __forceinline__ void set_sources(std::int32_t head_in_group) const {
    const Place place = Place::of(params);
    const std::int32_t head = place.head * params.group + head_in_group;
    source_of(0) = QueryCopy::source(block.query, place.batch, head);
    source_of(1) = QueryCopy::source(block.grad_out, place.batch, head);
    const std::int64_t row = (std::int64_t{place.batch} * block.Hq + head) * block.Sq + threadIdx.x;
    source_of(2) = static_cast<const char*>(block.minus_lse_log2) + 4 * row;
  }

  // dQ of a query tile: a warp makes 16 queries and kQueryColumns columns.
  static constexpr int kQueryColumns = kHeadDim * kQueries / 16 / kShape.warps;
  __device__ __forceinline__ int gradient_row() const { return warp % (kQueries / 16) * 16; }
  __device__ __forceinline__ int gradient_column() const { return warp / (kQueries / 16) * kQueryColumns; }

  __device__ __forceinline__ void set_gradient(std::int32_t head_in_group) const {
    if (!adds_queries()) return;
    const Place place = Place::of(params);
    const Rows& rows = block.grad_query;
    source_of(3) = reinterpret_cast<const char*>(static_cast<float*>(rows.data) + place.batch * rows.batch_stride +
                                                 (place.head * params.group + head_in_group) * rows.head_stride +
                                                 (gradient_row() + lane / 4) * rows.token_stride + gradient_column() +
                                                 lane % 4 * 2);
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
  __device__ __forceinline__ void find_intervals(int2 (&interval)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int32_t key = Place::of(params).tile * kKeys + key_row + r * 8 + lane / 4;
      interval[r] = {0, -1};
      if (key < block.Skv) {
        const std::int32_t position = position_of(block.key_segments, key);
        interval[r] = {block.mask.first_query(position), block.mask.last_query(position)};
      }
    }
  }

  // Scores of queries that do not see the key become -inf.
  __device__ __forceinline__ void apply_mask(Scores& s, std::int32_t first_query) const {
    int2 interval[2];
    find_intervals(interval);
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

  // p^T and ds^T of the warp's keys and some of its queries, rounded: A fragments of 16 queries each.
  template <int kFirst>
  __device__ __forceinline__ void make_products(Products& rounded_p, Products& rounded_ds, Tile tile, int stage) const {
    Scores p, ds;
    const std::uint32_t statistic =
        kept(shared + kFirstStage + stage + (column_part * kOwnQueries + kFirst + lane % 4 * 2) * 4);
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
    const std::uint32_t q = kept(wide + stage + column_part * kOwnQueries * kRowBytes);
    unrolled<kHeadDim / 16>([&]<int d>() {
      std::uint32_t a[2][1][4];
      load_matrices<fragment_offset<kKeys>(0, 16 * d)>(a[0][0], k ^ fragment_flip(16 * d));
      load_matrices<kKeyTile + fragment_offset<kKeys>(0, 16 * d)>(a[1][0], k ^ fragment_flip(16 * d));
      unrolled<kScoreQueries / 16>([&]<int n>() {
        constexpr int kOffset = kFirstStage + fragment_offset<kQueries>(kFirst + 16 * n, 16 * d);
        std::uint32_t b[4];
        load_matrices<kOffset>(b, q ^ fragment_flip(16 * d));
        multiply_pair<T>(p, 2 * n, a[0], b);
        load_matrices<kOffset + kQueryTile>(b, q ^ fragment_flip(16 * d));
        multiply_pair<T>(ds, 2 * n, a[1], b);
      });
    });
    if (!tile.is_full()) apply_mask(p, tile.index() * kQueries + column_part * kOwnQueries + kFirst);
    unrolled<kScoreQueries / 16>([&]<int step>() {
      unrolled<2>([&]<int half>() {
        constexpr int n = 2 * step + half;
        const float2 minus_lse = load_shared_float2<kStatistics + n * 32>(statistic);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float low = exp2_approx(fmaf(p[0][n][2 * r], params.scale_log2, minus_lse.x));
          const float high = exp2_approx(fmaf(p[0][n][2 * r + 1], params.scale_log2, minus_lse.y));
          rounded_p[step][0][2 * half + r] = pack<T>(low, high);
          rounded_ds[step][0][2 * half + r] = pack<T>(ds[0][n][2 * r] * low, ds[0][n][2 * r + 1] * high);
        }
      });
    });
  }

  // Stores x, whose first query is kFirst of the warp's, as [key][query].
  template <int kTile, int kFirst>
  __device__ __forceinline__ void store_product(const Products& x) const {
    const std::uint32_t at =
        kept((shared + pair_at(key_row + lane / 4)) ^ static_cast<std::uint32_t>(column_part * kOwnQueries * 2));
    unrolled<kScoreQueries / 8>([&]<int n>() {
      store_shared_4<kTile>(at ^ fragment_flip(kFirst + 8 * n), x[n / 2][0][n % 2 * 2]);
      store_shared_4<kTile + 8 * kRowBytes>(at ^ fragment_flip(kFirst + 8 * n), x[n / 2][0][n % 2 * 2 + 1]);
    });
  }

  // dV += p^T dO; dK += ds^T q, for 16 queries, whose A fragments are p and ds.
  template <int kStep>
  __device__ __forceinline__ void add_products(std::uint32_t q, const std::uint32_t (&p)[1][4],
                                               const std::uint32_t (&ds)[1][4]) {
    unrolled<kColumns / 16>([&]<int n>() {
      constexpr int kOffset = kFirstStage + fragment_offset<kQueries>(16 * kStep, 16 * n);
      std::uint32_t b[4];
      load_matrices_transposed<kOffset + kQueryTile>(b, q ^ fragment_flip(16 * n));
      multiply_pair<T>(dv, 2 * n, p, b);
      load_matrices_transposed<kOffset>(b, q ^ fragment_flip(16 * n));
      multiply_pair<T>(dk, 2 * n, ds, b);
    });
  }

  // dQ += scale ds k for the query tile, kPart columns at a time.
  __device__ __forceinline__ void add_query_gradient(Tile tile) const {
    constexpr int kPart = kQueryColumns < 64 ? kQueryColumns : 64;
    const int first_column = gradient_column();
    const std::uint32_t a_lane = kept(wide ^ static_cast<std::uint32_t>(gradient_row() * 2));
    const std::uint32_t b_lane = kept((tall + first_column / kPanelColumns * kKeys * kRowBytes) ^
                                      static_cast<std::uint32_t>(first_column % kPanelColumns * 2));
    unrolled<kQueryColumns / kPart>([&]<int part>() {
      float dq[1][kPart / 8][4] = {};
      unrolled<kKeys / 16>([&]<int k>() {
        std::uint32_t a[1][4];
        load_matrices_transposed<kDs + 16 * k * kRowBytes>(a[0], a_lane);
        unrolled<kPart / 16>([&]<int n>() {
          std::uint32_t b[4];
          load_matrices_transposed<fragment_offset<kKeys>(16 * k, part * kPart + 16 * n)>(
              b, b_lane ^ fragment_flip(16 * n));
          multiply_pair<T>(dq, 2 * n, a, b);
        });
      });
      const std::int32_t first = tile.index() * kQueries;
      float* to = reinterpret_cast<float*>(const_cast<char*>(source_of(3)));
      add_rows<kPart>(to + first * block.grad_query.token_stride + part * kPart, block.grad_query.token_stride, dq,
                      static_cast<float>(block.scale), static_cast<int>(block.Sq) - first - gradient_row(),
                      static_cast<int>(block.D) - first_column - part * kPart);
    });
  }

  // The accumulator of the keys gains factor d. Nobody else adds to these rows, so the order of additions is fixed.
  __device__ __forceinline__ void add_to_memory(const Rows& rows, const Gradient& d, float factor) const {
    if (rows.data == nullptr) return;
    const Place place = Place::of(params);
    const std::int32_t first = place.tile * kKeys + key_row, column = column_part * kColumns;
    float* to = static_cast<float*>(rows.data) + place.batch * rows.batch_stride + place.head * rows.head_stride +
                (first + lane / 4) * rows.token_stride + column + lane % 4 * 2;
    add_rows<kColumns>(to, rows.token_stride, d, factor, static_cast<int>(block.Skv) - first,
                       static_cast<int>(block.D) - column);
  }

  __device__ __forceinline__ void compute(Tile tile, int stage) {
    const std::uint32_t q = kept(tall + stage + column_part * (kColumns / kPanelColumns) * kQueries * kRowBytes);
    unrolled<kOwnQueries / kScoreQueries>([&]<int part>() {
      constexpr int kFirst = part * kScoreQueries;
      Products p, ds;
      make_products<kFirst>(p, ds, tile, stage);
      if constexpr (kShares) store_product<kP, kFirst>(p);
      if (kShares || adds_queries()) store_product<kDs, kFirst>(ds);
      if constexpr (!kShares) {
        unrolled<kScoreQueries / 16>([&]<int i>() { add_products<kFirst / 16 + i>(q, p[i], ds[i]); });
      }
    });
    if (kShares || adds_queries()) __syncthreads();  // p and ds are complete
    if constexpr (kShares) {
      const std::uint32_t product = kept(tall + key_row * kRowBytes);
      unrolled<kQueries / 16>([&]<int i>() {
        std::uint32_t p[1][4], ds[1][4];
        load_matrices<kP>(p[0], product ^ fragment_flip(16 * i));
        load_matrices<kDs>(ds[0], product ^ fragment_flip(16 * i));
        add_products<i>(q, p, ds);
      });
    }
    if (adds_queries()) add_query_gradient(tile);
  }

  __device__ __forceinline__ void run() {
    const Place place = Place::of(params);
    VisibleTiles<false, kQueries, kKeys> walk(block, place.tile);
    Tile now = walk.next();
    if (!now.exists()) return;

    KeyCopy{}(shared + KeyCopy::lane(), KeyCopy::source(block.key, place.batch, place.head), block.key,
              place.tile * kKeys, params, block.Skv);
    KeyCopy{}(shared + kKeyTile + KeyCopy::lane(), KeyCopy::source(block.value, place.batch, place.head), block.value,
              place.tile * kKeys, params, block.Skv);
    set_sources(0);
    set_gradient(0);
    copy_queries(now, 0);
    commit_copies();
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dk[0][n][i] = dv[0][n][i] = 0.0f;
    }
    int stage = 0;
    std::int32_t head = 0;  // of the tile that is copied
    while (now.exists()) {
      Tile next = walk.next();
      const bool turns = !next.exists() && head + 1 < params.group;  // to the next head, from its first tile on
      if (turns) {
        walk.restart();
        next = walk.next();
        set_sources(++head);
      }
      wait_copies<0>();
      __syncthreads();  // this query tile has landed everywhere; the previous one has been read by all
      if constexpr (kStages == 2) {
        if (next.exists()) copy_queries(next, kStage - stage);
        commit_copies();
      }
      compute(now, stage);
      if (turns) set_gradient(head);
      if constexpr (kStages == 1) {
        __syncthreads();
        if (next.exists()) copy_queries(next, 0);
        commit_copies();
      } else {
        stage = kStage - stage;
      }
      now = next;
    }
    add_to_memory(block.grad_key, dk, static_cast<float>(block.scale));
    add_to_memory(block.grad_value, dv, 1.0f);
  }
};

template <DType T, int kHeadDim>
__device__ __forceinline__ void backward_keys(const Params& params) {
  BackwardKeys<T, kHeadDim> kernel{params, params.block, shared_address(BackwardKeys<T, kHeadDim>::shared_pointer())};
  kernel.run();
}

}  // namespace ringattn::cuda
