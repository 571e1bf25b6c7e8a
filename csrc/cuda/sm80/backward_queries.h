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
#include "cuda/sm80/key_mask.h"
#include "cuda/tile.h"
#include "cuda/visible_tiles.h"

namespace ringattn::cuda {

template <DType T, int kHeadDim>
struct BackwardQueries {
  static constexpr Shape kShape = shape_of(Kernel::backward_queries, kArch, kHeadDim);
  static constexpr int kQueries = kShape.queries, kKeys = kShape.keys, kThreads = kShape.threads();
  static_assert(kQueries == 16 * kShape.warps && kShape.tiles_per_warp == 1 && kShape.stages == 2);

  // Shared memory: q, dO, the stages of k and v, the interval of visible keys of every row, and pointers.
  static constexpr int kQueryTile = kTileBytes<kQueries, kHeadDim>, kKeyTile = kTileBytes<kKeys, kHeadDim>;
  static constexpr int kFirstStage = 2 * kQueryTile, kStage = 2 * kKeyTile;
  static constexpr int kIntervals = kFirstStage + 2 * kStage, kSources = kIntervals + kQueries * 8;
  static_assert(kSources + (kShape.keeps_sources ? 0 : kThreads * 16) ==
                shared_bytes_of(Kernel::backward_queries, kShape, kHeadDim));

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
  std::uint32_t tall = kept(shared + tall_lane(lane)), wide = kept(shared + wide_lane(lane));
  float minus_lse[2], minus_delta[2];  // of the lane's rows
  float dq[1][kHeadDim / 8][4];
  const char* sources[kShape.keeps_sources ? 2 : 1];

  __device__ __forceinline__ static char* shared_pointer() {
    extern __shared__ __align__(1024) char memory[];
    return memory;
  }
  __device__ __forceinline__ static int2* intervals() { return reinterpret_cast<int2*>(shared_pointer() + kIntervals); }

  __device__ __forceinline__ int row_of(int r) const { return warp * 16 + r * 8 + lane / 4; }

  // Where this thread starts to read keys (0) and values (1).
  __device__ __forceinline__ const char*& source_of(int which) {
    if constexpr (kShape.keeps_sources) {
      return sources[which];
    } else {
      return pointer_slot<kThreads>(shared_pointer() + kSources, which);
    }
  }

  __device__ __forceinline__ void copy_keys(Tile tile, int stage) {
    const std::uint32_t to = kept(shared + kFirstStage + stage + KeyCopy::lane());
    KeyCopy{}(to, source_of(0), block.key, tile.index() * kKeys, params, block.Skv);
    KeyCopy{}(to + kKeyTile, source_of(1), block.value, tile.index() * kKeys, params, block.Skv);
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

  __device__ __forceinline__ void absorb(Tile tile, int stage) {
    Scores s, ds;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[0][n][i] = 0.0f;
        ds[0][n][i] = minus_delta[i / 2];
      }
    }
    const std::uint32_t q = kept(tall + warp * 16 * kRowBytes), k = kept(wide + stage);
    unrolled<kHeadDim / 16>([&]<int d>() {
      std::uint32_t a[2][1][4];
      load_matrices<fragment_offset<kQueries>(0, 16 * d)>(a[0][0], q ^ fragment_flip(16 * d));
      load_matrices<kQueryTile + fragment_offset<kQueries>(0, 16 * d)>(a[1][0], q ^ fragment_flip(16 * d));
      unrolled<kKeys / 16>([&]<int n>() {
        constexpr int kOffset = kFirstStage + fragment_offset<kKeys>(16 * n, 16 * d);
        std::uint32_t b[4];
        load_matrices<kOffset>(b, k ^ fragment_flip(16 * d));
        multiply_pair<T>(s, 2 * n, a[0], b);
        load_matrices<kOffset + kKeyTile>(b, k ^ fragment_flip(16 * d));
        multiply_pair<T>(ds, 2 * n, a[1], b);
      });
    });
    if (!tile.is_full()) mask_keys(s, intervals(), warp * 16, block, tile.index() * kKeys);
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) ds[0][n][i] *= exp2_approx(fmaf(s[0][n][i], params.scale_log2, minus_lse[i / 2]));
    }
    const std::uint32_t key = kept(tall + stage);
    unrolled<kKeys / 16>([&]<int step>() {
      std::uint32_t a[1][4];
      pack_a<T>(a, ds, step);
      unrolled<kHeadDim / 16>([&]<int n>() {
        std::uint32_t b[4];
        load_matrices_transposed<kFirstStage + fragment_offset<kKeys>(16 * step, 16 * n)>(b,
                                                                                          key ^ fragment_flip(16 * n));
        multiply_pair<T>(dq, 2 * n, a, b);
      });
    });
  }

  // Nobody else adds to these rows, so the order of additions is fixed.
  __device__ __forceinline__ void add_to_memory(const Place& place) const {
    const Rows& rows = block.grad_query;
    const std::int32_t first = place.tile * kQueries + warp * 16;
    float* to = static_cast<float*>(rows.data) + place.batch * rows.batch_stride + place.head * rows.head_stride +
                (first + lane / 4) * rows.token_stride + lane % 4 * 2;
    add_rows<kHeadDim>(to, rows.token_stride, dq, static_cast<float>(block.scale), static_cast<int>(block.Sq) - first,
                       static_cast<int>(block.D));
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
    const std::int32_t key_head = place.head / params.group;
    source_of(0) = KeyCopy::source(block.key, place.batch, key_head);
    source_of(1) = KeyCopy::source(block.value, place.batch, key_head);
    copy_keys(now, 0);
    commit_copies();
    store_intervals<kQueries, kThreads>(intervals(), block, place.tile);
    load_statistics(place);
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) dq[0][n][i] = 0.0f;
    }
    int stage = 0;
    while (now.exists()) {
      const Tile next = walk.next();
      wait_copies<0>();
      __syncthreads();  // this key tile has landed everywhere; the previous one has been read by all
      if (next.exists()) copy_keys(next, kStage - stage);
      commit_copies();
      absorb(now, stage);
      stage = kStage - stage;
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
