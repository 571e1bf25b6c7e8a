// Forward for one block of keys and values, with mma.sync: the state (o, m, l) of a tile of queries absorbs every key
// tile that the mask lets it see.
//
//   s = q k^T;  p = exp2(c s - c m);  l += rowsum(p);  o += p v         c = scale * log2(e)
//
// A thread block owns one query tile of one head; a warp owns 16 or 32 of its rows, from the scores to the output, so
// nothing but the copies is shared between warps. Q is staged once. Of K and V one tile each is in shared memory: V is
// copied while the scores are computed, the next K while the softmax and the second product are.
//
// m is a reference, not always the maximum. The exponentials are taken with the m at hand; only if their sum outgrows
// 2^8 in some row, m is raised to the maximum, o and l are rescaled and the exponentials taken again. That is exact in
// exact arithmetic, happens in the first tile and rarely afterwards, and saves the search for the maximum elsewhere. An
// exponential of at most 2^8 fits float16. All lanes of a row know m; l is spread over the four lanes of a row until
// the end. Sums that started from a carried state start there, so a pass cut into calls on a tile boundary takes the
// same decisions and gives the same o and m.
#pragma once

#include <cfloat>

#include "cuda/params.h"
#include "cuda/shapes.h"
#include "cuda/sm80/key_mask.h"
#include "cuda/tile.h"
#include "cuda/visible_tiles.h"

namespace ringattn::cuda {

template <int kHeadDim>
struct ForwardTiles {
  static constexpr Shape kShape = shape_of(Kernel::forward, kArch, kHeadDim);
  static constexpr int kQueries = kShape.queries, kKeys = kShape.keys;
  static constexpr int kScoreKeys = kShape.score_columns;
  static constexpr bool kKeepsQueries = kHeadDim == 64;    // their fragments in registers
  static constexpr int kMmaTiles = kShape.tiles_per_warp;  // m16 tiles of a warp
  static constexpr int kRows = 2 * kMmaTiles;              // rows of a lane
  static_assert(kQueries == 16 * kMmaTiles * kShape.warps);

  // Shared memory: q, k, v, the interval of visible keys of every row, and pointers.
  static constexpr int kKeyTile = kTileBytes<kQueries, kHeadDim>;
  static constexpr int kValueTile = kKeyTile + kTileBytes<kKeys, kHeadDim>;
  static constexpr int kIntervals = kValueTile + kTileBytes<kKeys, kHeadDim>;
  static constexpr int kSources = kIntervals + kQueries * static_cast<int>(sizeof(int2));
  static constexpr int kSharedBytes =
      kSources + (kShape.keeps_sources ? 0 : kShape.threads() * 2 * static_cast<int>(sizeof(char*)));
  static_assert(kSharedBytes == shared_bytes_of(Kernel::forward, kShape, kHeadDim));
};

// What a thread block works on: under a causal mask the last query tiles take longest, so they start first.
struct Place {
  std::int32_t tile, head, batch;

  __device__ __forceinline__ static Place of(const Params& params) {
    const std::int32_t index = block_index(), rest = index / params.query_tiles;
    const auto heads = static_cast<std::int32_t>(params.block.Hq);
    return {params.query_tiles - 1 - index % params.query_tiles, rest % heads, rest / heads};
  }
};

// The lane's part of the state of its rows. Row r of a lane is row 16 (r / 2) + 8 (r % 2) + lane / 4 of its warp.
template <int kMmaTiles, int kHeadDim>
struct RowState {
  float o[kMmaTiles][kHeadDim / 8][4];
  float m[2 * kMmaTiles];
  float l[2 * kMmaTiles];
  float limit;  // of the sums of exponentials: 2^8, or -1 to take every softmax the slow and exact way

  // c m is rounded, which makes exponentials wrong by a common factor. It cancels, unless m is so large that the factor
  // could overflow: then the slow way forms c (s - m).
  __device__ __forceinline__ void choose_limit(float scale_log2) {
    constexpr float kExactBelow = 65536.0f;
    bool large = false;
#pragma unroll
    for (int r = 0; r < 2 * kMmaTiles; ++r) large |= fabsf(m[r]) * scale_log2 > kExactBelow && m[r] != -INFINITY;
    limit = __any_sync(kWholeWarp, large) ? -1.0f : 256.0f;
  }
};

// Makes the reference of every row at least its maximum in s, and rescales the row accordingly.
template <int kMmaTiles, int kHeadDim, int kColumns>
__device__ __forceinline__ void raise_reference(RowState<kMmaTiles, kHeadDim>& state,
                                                const float (&s)[kMmaTiles][kColumns][4], float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2 * kMmaTiles; ++r) {
    float largest = -INFINITY;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      largest = fmaxf(fmaxf(largest, s[r / 2][n][r % 2 * 2]), s[r / 2][n][r % 2 * 2 + 1]);
    }
    const float m = fmaxf(state.m[r], quad_max(largest));
    const float factor = m == state.m[r] ? 1.0f : exp2_approx((state.m[r] - m) * scale_log2);
    state.m[r] = m;
    state.l[r] *= factor;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      state.o[r / 2][n][r % 2 * 2] *= factor;
      state.o[r / 2][n][r % 2 * 2 + 1] *= factor;
    }
  }
  state.choose_limit(scale_log2);
}

// p = exp2(c s - c m), rounded to T, as the A fragments of the second product; sums: of the lane's p, row by row.
template <DType T, bool kExact, int kMmaTiles, int kHeadDim, int kColumns>
__device__ __forceinline__ void exponentials(std::uint32_t (&p)[kColumns / 2][kMmaTiles][4],
                                             float (&sums)[2 * kMmaTiles], const float (&s)[kMmaTiles][kColumns][4],
                                             const RowState<kMmaTiles, kHeadDim>& state, const Params& params) {
#pragma unroll
  for (int r = 0; r < 2 * kMmaTiles; ++r) {
    // A row that has seen nothing has m = -inf: keys that it does not see give 0, not NaN, and any other gives +inf.
    const float shift = fminf(state.m[r] * params.minus_scale_log2, FLT_MAX);
    const float reference = state.m[r] == -INFINITY ? 0.0f : state.m[r];
    const auto exponential = [&](float score) {
      return exp2_approx(kExact ? (score - reference) * params.scale_log2 : fmaf(score, params.scale_log2, shift));
    };
    sums[r] = 0.0f;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const float low = exponential(s[r / 2][n][r % 2 * 2]);
      const float high = exponential(s[r / 2][n][r % 2 * 2 + 1]);
      sums[r] = n == 0 ? low + high : sums[r] + low + high;
      p[n / 2][r / 2][n % 2 * 2 + r % 2] = pack<T>(low, high);
    }
  }
}

// The softmax of one part of a key tile: p from s, with a reference that p does not outgrow; l gains the row sums.
template <DType T, int kMmaTiles, int kHeadDim, int kColumns>
__device__ __forceinline__ void softmax(std::uint32_t (&p)[kColumns / 2][kMmaTiles][4],
                                        const float (&s)[kMmaTiles][kColumns][4], RowState<kMmaTiles, kHeadDim>& state,
                                        const Params& params) {
  float sums[2 * kMmaTiles];
#pragma unroll 1
  while (true) {  // once, or twice: exponentials below the maximum are at most 1, and a little more where m is rounded
    exponentials<T, false>(p, sums, s, state, params);
    float largest = sums[0];
#pragma unroll
    for (int r = 1; r < 2 * kMmaTiles; ++r) largest = fmaxf(largest, sums[r]);
    if (!__any_sync(kWholeWarp, largest > state.limit)) break;
    raise_reference(state, s, params.scale_log2);
    if (state.limit < 0.0f) {
      exponentials<T, true>(p, sums, s, state, params);
      break;
    }
  }
#pragma unroll
  for (int r = 0; r < 2 * kMmaTiles; ++r) state.l[r] += sums[r];
}

template <DType T, int kHeadDim>
struct Forward : ForwardTiles<kHeadDim> {
  using Tiles = ForwardTiles<kHeadDim>;
  using Tiles::kKeys, Tiles::kQueries, Tiles::kScoreKeys, Tiles::kKeepsQueries, Tiles::kMmaTiles, Tiles::kRows,
      Tiles::kShape;
  static constexpr int kThreads = kShape.threads();
  using QueryCopy = TileCopy<kQueries, kHeadDim, kThreads>;
  using KeyCopy = TileCopy<kKeys, kHeadDim, kThreads>;

  const Params& params;
  const BlockArgs& block = params.block;
  std::uint32_t shared;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  std::uint32_t copy_to = kept(shared + QueryCopy::lane());
  std::uint32_t q_lane = kept(shared + warp * 16 * kMmaTiles * kRowBytes + tall_lane(lane));
  std::uint32_t k_lane = kept(shared + Tiles::kKeyTile + wide_lane(lane));
  std::uint32_t v_lane = kept(shared + Tiles::kValueTile + tall_lane(lane));
  using Scores = float[kMmaTiles][kScoreKeys / 8][4];
  using Fragments = std::uint32_t[kMmaTiles][4];  // of A: 16 columns of the warp's rows
  using Probabilities = Fragments[kScoreKeys / 16];
  Fragments queries[kKeepsQueries ? kHeadDim / 16 : 1];
  RowState<kMmaTiles, kHeadDim> state;
  const char* sources[kShape.keeps_sources ? 2 : 1];

  __device__ __forceinline__ std::int32_t row_of(int r) const {
    return warp * 16 * kMmaTiles + r / 2 * 16 + r % 2 * 8 + lane / 4;
  }
  __device__ __forceinline__ std::int64_t state_row(const Place& place, std::int32_t token) const {
    return (std::int64_t{place.batch} * block.Hq + place.head) * block.Sq + token;
  }

  // Where this thread starts to read keys (0) and values (1). Registers are scarce, so they lie in shared memory,
  // unless that is scarcer.
  __device__ __forceinline__ const char*& source_of(int which) {
    if constexpr (kShape.keeps_sources) {
      return sources[which];
    } else {
      return pointer_slot<kThreads>(shared_pointer() + Tiles::kSources, which);
    }
  }

  __device__ __forceinline__ void copy_keys(Tile tile) {
    KeyCopy{}(copy_to + Tiles::kKeyTile, source_of(0), block.key, tile.index() * kKeys, params, block.Skv);
  }
  __device__ __forceinline__ void copy_values(Tile tile) {
    KeyCopy{}(copy_to + Tiles::kValueTile, source_of(1), block.value, tile.index() * kKeys, params, block.Skv);
  }

  __device__ __forceinline__ static char* shared_pointer() {
    extern __shared__ __align__(1024) char memory[];
    return memory;
  }
  __device__ __forceinline__ static int2* intervals() {
    return reinterpret_cast<int2*>(shared_pointer() + Tiles::kIntervals);
  }

  // Rows past the end have scores of 0. Their reference is 0 from the start, so that they never ask to raise those of
  // the rows that share the warp.
  __device__ __forceinline__ void empty_state(const Place& place) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      state.m[r] = place.tile * kQueries + row_of(r) < block.Sq ? -INFINITY : 0.0f;
      state.l[r] = 0.0f;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) state.o[r / 2][n][r % 2 * 2] = state.o[r / 2][n][r % 2 * 2 + 1] = 0.0f;
    }
  }

  __device__ __forceinline__ void load_state(const Place& place) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::int32_t token = place.tile * kQueries + row_of(r);
      const bool inside = token < block.Sq;
      const std::int64_t row = state_row(place, token);
      state.m[r] = inside ? static_cast<const float*>(block.m)[row] : 0.0f;
      state.l[r] = inside && lane % 4 == 0 ? static_cast<const float*>(block.l)[row] : 0.0f;
      const float* o = static_cast<const float*>(block.o) + row * block.D + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        const bool read = inside && n * 8 < block.D;
        const float2 pair = read ? *reinterpret_cast<const float2*>(o + n * 8) : float2{0.0f, 0.0f};
        state.o[r / 2][n][r % 2 * 2] = pair.x;
        state.o[r / 2][n][r % 2 * 2 + 1] = pair.y;
      }
    }
  }

  __device__ __forceinline__ void store_state(const Place& place) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float l = quad_sum(state.l[r]);
      const std::int32_t token = place.tile * kQueries + row_of(r);
      if (token >= block.Sq) continue;
      const std::int64_t row = state_row(place, token);
      if (lane % 4 == 0) {
        static_cast<float*>(block.m)[row] = state.m[r];
        static_cast<float*>(block.l)[row] = l;
      }
      float* o = static_cast<float*>(block.o) + row * block.D + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        if (n * 8 >= block.D) break;
        *reinterpret_cast<float2*>(o + n * 8) = {state.o[r / 2][n][r % 2 * 2], state.o[r / 2][n][r % 2 * 2 + 1]};
      }
    }
  }

  // out = o / l by way of the warp's own rows of the query tile, so that 16 bytes are stored at a time; lse.
  __device__ __forceinline__ void finalize(const Place& place) {
    __syncwarp();  // all lanes are done with the queries
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float l = quad_sum(state.l[r]);
      const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
      const std::int32_t token = place.tile * kQueries + row_of(r);
      if (lane % 4 == 0 && token < block.Sq) {
        static_cast<float*>(block.lse)[state_row(place, token)] =
            l == 0.0f ? -INFINITY : fmaf(state.m[r], static_cast<float>(block.scale), log_approx(l));
      }
      unrolled<kHeadDim / 8>([&]<int n>() {
        store_shared_4<fragment_offset<kQueries>(0, 8 * n)>(
            (shared + pair_at(row_of(r))) ^ fragment_flip(8 * n),
            pack<T>(state.o[r / 2][n][r % 2 * 2] * inverse, state.o[r / 2][n][r % 2 * 2 + 1] * inverse));
      });
    }
    __syncwarp();
    store_rows(place);
  }

  // Rows of the query tile, which hold the output now, to memory: eight lanes take one row of a panel.
  __device__ __forceinline__ void store_rows(const Place& place) const {
    const Rows& out = block.out;
    const int column = lane % 8 * kChunk;
    int row = warp * 16 * kMmaTiles + lane / 8;
    auto* to = static_cast<std::uint16_t*>(out.data) + place.batch * out.batch_stride + place.head * out.head_stride +
               (std::int64_t{place.tile} * kQueries + row) * out.token_stride + column;
#pragma unroll
    for (int i = 0; i < 4 * kMmaTiles; ++i) {
      if (place.tile * kQueries + row >= block.Sq) break;
#pragma unroll
      for (int panel = 0; panel < kHeadDim / kPanelColumns; ++panel) {
        if (panel * kPanelColumns + column >= block.D) break;
        std::uint32_t words[4];
        load_shared_16(words, shared + (panel * kQueries + row) * kRowBytes + ((lane % 8 ^ row % 8) << 4));
        if (params.aligned) {
          store_global_16(to + panel * kPanelColumns, words);
        } else {
#pragma unroll
          for (int j = 0; j < kChunk; ++j) {
            to[panel * kPanelColumns + j] = static_cast<std::uint16_t>(words[j / 2] >> 16 * (j % 2));
          }
        }
      }
      row += 4;
      to += 4 * out.token_stride;
    }
  }

  // s = q k^T for the part of the key tile that starts at key kFirst.
  template <int kFirst>
  __device__ __forceinline__ void scores(Scores& s) const {
    const std::uint32_t q = kept(q_lane), k = kept(k_lane);
    unrolled<kHeadDim / 16>([&]<int d>() {
      [[maybe_unused]] Fragments a;
      if constexpr (!kKeepsQueries) load_a<kQueries, 16 * d>(a, q);
      unrolled<kScoreKeys / 16>([&]<int n>() {
        std::uint32_t b[4];
        load_matrices<fragment_offset<kKeys>(kFirst + 16 * n, 16 * d)>(b, k ^ fragment_flip(16 * d));
        if constexpr (kKeepsQueries) {
          multiply_pair<T, d == 0>(s, 2 * n, queries[d], b);
        } else {
          multiply_pair<T, d == 0>(s, 2 * n, a, b);
        }
      });
    });
  }

  // o += p v
  template <int kFirst>
  __device__ __forceinline__ void add_values(const Probabilities& p) {
    const std::uint32_t v = kept(v_lane);
    unrolled<kScoreKeys / 16>([&]<int k>() {
      unrolled<kHeadDim / 16>([&]<int d>() {
        std::uint32_t b[4];
        load_matrices_transposed<fragment_offset<kKeys>(kFirst + 16 * k, 16 * d)>(b, v ^ fragment_flip(16 * d));
        multiply_pair<T>(state.o, 2 * d, p[k], b);
      });
    });
  }

  __device__ __forceinline__ void run() {
    const Place place = Place::of(params);
    VisibleTiles<true, kQueries, kKeys> walk(block, place.tile);
    Tile now = walk.next();
    if (!now.exists() && block.load_state && !block.finalize) return;  // the state stays as it is

    const std::int32_t key_head = place.head / params.group;
    source_of(0) = KeyCopy::source(block.key, place.batch, key_head);
    source_of(1) = KeyCopy::source(block.value, place.batch, key_head);
    if (now.exists()) {
      QueryCopy{}(copy_to, QueryCopy::source(block.query, place.batch, place.head), block.query, place.tile * kQueries,
                  params, block.Sq);
      copy_keys(now);
      commit_copies();
      store_intervals<kQueries, kThreads>(intervals(), block, place.tile);
    }
    if (block.load_state) {
      load_state(place);
      state.choose_limit(params.scale_log2);
    } else {
      empty_state(place);
      state.limit = 256.0f;
    }
    if constexpr (kKeepsQueries) {
      if (now.exists()) {
        wait_copies<0>();
        __syncthreads();
        unrolled<kHeadDim / 16>([&]<int d>() { load_a<kQueries, 16 * d>(queries[d], q_lane); });
      }
    }
    while (now.exists()) {
      wait_copies<0>();
      __syncthreads();  // this key tile has landed everywhere; the previous value tile has been read by all
      copy_values(now);
      commit_copies();
      const Tile next = walk.next();
      unrolled<kKeys / kScoreKeys>([&]<int part>() {
        constexpr int kFirst = part * kScoreKeys;
        Scores s;
        scores<kFirst>(s);
        wait_copies<0>();
        __syncthreads();  // this value tile has landed everywhere; this part of the key tile has been read by all
        if (kFirst + kScoreKeys == kKeys && next.exists()) copy_keys(next);
        commit_copies();
        if (!now.is_full()) mask_keys(s, intervals(), warp * 16 * kMmaTiles, block, now.index() * kKeys + kFirst);
        Probabilities p;
        softmax<T>(p, s, state, params);
        add_values<kFirst>(p);
      });
      now = next;
    }
    if (block.store_state) store_state(Place::of(params));
    if (block.finalize) finalize(Place::of(params));
  }
};

template <DType T, int kHeadDim>
__device__ __forceinline__ void forward(const Params& params) {
  Forward<T, kHeadDim> kernel{{}, params, params.block, shared_address(Forward<T, kHeadDim>::shared_pointer())};
  kernel.run();
}

}  // namespace ringattn::cuda
