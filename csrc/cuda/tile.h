// Tiles in shared memory and the verbs that move them.
//
// A tile of [rows, D] 16-bit elements is cut into panels of 64 columns: 128 bytes a row, one panel after the other. The
// 16-byte chunk c of row r lies at chunk c ^ (r % 8), so that eight rows of one chunk column never share a bank. It is
// the 128-byte swizzle of tensor maps and wgmma.
#pragma once

#include "cuda/params.h"
#include "cuda/ptx.h"

namespace ringattn::cuda {

inline constexpr int kPanelColumns = 64;
inline constexpr int kRowBytes = 128;
inline constexpr int kChunk = 8;  // elements of 16 bytes

template <int kRows, int kColumns>
inline constexpr int kTileBytes = kRows * kColumns * 2;

// Where this lane's row address of an ldmatrix lies in a tile, for the two ways in which four 8 x 8 matrices make up
// 16 x 16. Bits 5 and 6 may be flipped to step along the columns, multiples of 1024 added to step along the rows.
//
//   tall: matrices 0, 1 below each other.    A from [m][k]; with .trans B from [k][n]
//   wide: matrices 0, 1 beside each other.   B from [n][k]; with .trans A from [k][m]
__device__ __forceinline__ std::uint32_t tall_lane(int lane) {
  return lane % 16 * kRowBytes + ((lane / 16 ^ lane % 8) << 4);
}
__device__ __forceinline__ std::uint32_t wide_lane(int lane) {
  return (lane % 8 + lane / 16 * 8) * kRowBytes + ((lane / 8 % 2 ^ lane % 8) << 4);
}

// Where the 16 x 16 elements at (row, column) of a tile lie, as two parts of an address: bits to flip in the lane's
// address, and bytes to add. Rows and columns are multiples of 16.
__host__ __device__ constexpr std::uint32_t fragment_flip(int column) { return column % kPanelColumns * 2; }
template <int kRows>
__host__ __device__ constexpr int fragment_offset(int row, int column) {
  return (column / kPanelColumns * kRows + row) * kRowBytes;
}

// Where a lane's pair of a fragment's elements in row `row` lies: columns 2t and 2t + 1 of the first eight. Others are
// reached as above.
__device__ __forceinline__ std::uint32_t pair_at(int row) {
  return row * kRowBytes + (row % 8 << 4) + threadIdx.x % 4 * 4;
}

// Copies tiles of [kRows, kColumns] with all threads of the block: eight of them take one row of a panel. Rows from
// `count` on and columns from `columns` on, a multiple of 8, become zero. Asynchronous, except that rows that are not
// aligned to 16 bytes are copied element by element at once.
template <int kRows, int kColumns, int kThreads>
struct TileCopy {
  static constexpr int kStep = kThreads / 8;  // rows between two copies of a thread
  static constexpr int kPanels = kColumns / kPanelColumns;
  static_assert(kRows % kStep == 0 && kStep % 8 == 0);

  // Where this thread's part of a tile lies.
  __device__ __forceinline__ static std::uint32_t lane() {
    return threadIdx.x / 8 * kRowBytes + ((threadIdx.x % 8 ^ threadIdx.x / 8 % 8) << 4);
  }

  // to: the tile's address and `lane`. from: the first row's address and this thread's part, as `source` makes it.
  __device__ __forceinline__ void whole(std::uint32_t to, const char* from, std::int64_t stride) const {
    unrolled<kRows / kStep>([&]<int i>() {
      unrolled<kPanels>(
          [&]<int panel>() { copy_async_16<(panel * kRows + i * kStep) * kRowBytes, panel * kRowBytes>(to, from); });
      from += kStep * stride;
    });
  }

  __device__ __forceinline__ void part(std::uint32_t to, const char* from, std::int64_t stride, int count, int columns,
                                       bool aligned) const {
#pragma unroll 1
    for (int row = threadIdx.x / 8; row < kRows; row += kStep) {
#pragma unroll 1
      for (int panel = 0; panel < kPanels; ++panel) {
        const bool inside = row < count && panel * kPanelColumns + threadIdx.x % 8 * kChunk < columns;
        const char* source = from + panel * kRowBytes;
        if (aligned) {
          copy_async_16_or_zero(to + panel * kRows * kRowBytes, source, inside);
          continue;
        }
        std::uint32_t words[4] = {};
        if (inside) {
          const auto* elements = reinterpret_cast<const std::uint16_t*>(source);
#pragma unroll
          for (int i = 0; i < 4; ++i) words[i] = elements[2 * i] | std::uint32_t{elements[2 * i + 1]} << 16;
        }
        store_shared_16(to + panel * kRows * kRowBytes, words);
      }
      to += kStep * kRowBytes;
      from += kStep * stride;
    }
  }

  __device__ __forceinline__ static const char* source(const Rows& rows, std::int64_t batch, std::int64_t head) {
    return static_cast<const char*>(rows.data) + 2 * (batch * rows.batch_stride + head * rows.head_stride +
                                                      threadIdx.x / 8 * rows.token_stride + threadIdx.x % 8 * kChunk);
  }

  // The tile that starts at `token` of `tokens`; from: as `source` makes it.
  __device__ __forceinline__ void operator()(std::uint32_t to, const char* from, const Rows& rows, std::int32_t token,
                                             const Params& params, std::int64_t tokens) const {
    const std::int64_t stride = 2 * rows.token_stride;
    from += token * stride;
    const auto left = static_cast<std::int32_t>(tokens) - token;
    if (params.fills_columns && left >= kRows) {
      whole(to, from, stride);
    } else {
      part(to, from, stride, left, static_cast<int>(params.block.D), params.aligned);
    }
  }
};

// A pointer of this thread, one of those behind `memory`: where registers are scarce, pointers lie in shared memory.
template <int kThreads>
__device__ __forceinline__ const char*& pointer_slot(char* memory, int which) {
  return reinterpret_cast<const char**>(memory)[which * kThreads + thread_index()];
}

// A fragments of kTiles x 16 rows from row 0 on at a column: [m][k] in memory. lane: the tile's address and tall_lane.
template <int kRows, int kColumn, int kTiles>
__device__ __forceinline__ void load_a(std::uint32_t (&a)[kTiles][4], std::uint32_t lane) {
  unrolled<kTiles>(
      [&]<int i>() { load_matrices<fragment_offset<kRows>(16 * i, kColumn)>(a[i], lane ^ fragment_flip(kColumn)); });
}

// d += a b for 16 columns of d, whose B fragments are b; the first product of a sum: d = a b.
template <DType T, bool kFirst = false, int kTiles, int kColumns>
__device__ __forceinline__ void multiply_pair(float (&d)[kTiles][kColumns][4], int n,
                                              const std::uint32_t (&a)[kTiles][4], const std::uint32_t (&b)[4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    if constexpr (kFirst) {
      multiply<T>(d[i][n], a[i], b[0], b[1]);
      multiply<T>(d[i][n + 1], a[i], b[2], b[3]);
    } else {
      multiply_add<T>(d[i][n], a[i], b[0], b[1]);
      multiply_add<T>(d[i][n + 1], a[i], b[2], b[3]);
    }
  }
}

// The A fragments of k-step `step` from accumulators: columns 16 step … 16 step + 15, rounded to T.
template <DType T, int kTiles, int kColumns>
__device__ __forceinline__ void pack_a(std::uint32_t (&a)[kTiles][4], const float (&c)[kTiles][kColumns][4], int step) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      a[i][2 * half] = pack<T>(c[i][2 * step + half][0], c[i][2 * step + half][1]);
      a[i][2 * half + 1] = pack<T>(c[i][2 * step + half][2], c[i][2 * step + half][3]);
    }
  }
}

// Memory += factor d, for the 16 rows of an accumulator fragment. to: the lane's first element, in row lane / 4 and
// column 2t; rows, columns: how many are left there, from the fragment's first on.
template <int kColumns>
__device__ __forceinline__ void add_rows(float* to, std::int64_t stride, const float (&d)[1][kColumns / 8][4],
                                         float factor, int rows, int columns) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (thread_index() % 32 / 4 + 8 * r >= rows) return;
    const auto add = [&]<int n>() {
      add_global<32 * n>(to, d[0][n][2 * r] * factor);
      add_global<32 * n + 4>(to, d[0][n][2 * r + 1] * factor);
    };
    if (columns >= kColumns) {
      unrolled<kColumns / 8>(add);
    } else {
      unrolled<kColumns / 8>([&]<int n>() {
        if (8 * n < columns) add.template operator()<n>();
      });
    }
    to += 8 * stride;
  }
}

}  // namespace ringattn::cuda
