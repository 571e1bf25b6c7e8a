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

// The 16 x 16 elements at (row, column) of a tile; both multiples of 16. lane: the tile's address plus the lane's.
template <int kRows>
__device__ __forceinline__ std::uint32_t fragment_at(std::uint32_t lane, int row, int column) {
  return (lane ^ (column % kPanelColumns * 2)) + column / kPanelColumns * kRows * kRowBytes + row * kRowBytes;
}

// Where the pair of elements (row, column), (row, column + 1) lies, relative to the tile.
template <int kRows>
__device__ __forceinline__ std::uint32_t pair_at(int row, int column) {
  return column / kPanelColumns * kRows * kRowBytes + row * kRowBytes +
         ((column % kPanelColumns / kChunk ^ row % 8) << 4) + column % kChunk * 2;
}

// Rows of one head in global memory.
struct GlobalRows {
  const char* data;
  std::int64_t stride;  // bytes

  __device__ GlobalRows(const Rows& rows, std::int64_t batch, std::int64_t head, std::int64_t token)
      : data(static_cast<const char*>(rows.data) +
             2 * (batch * rows.batch_stride + head * rows.head_stride + token * rows.token_stride)),
        stride(2 * rows.token_stride) {}
};

// Copies `count` rows of `columns` elements into a tile; the rest of the tile becomes zero. The thread block does it
// together: eight threads take one row of a panel. Asynchronous, except that rows that are not aligned to 16 bytes are
// copied element by element at once. columns is a multiple of 8.
template <int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void copy_tile(std::uint32_t tile, const GlobalRows& from, int count, int columns,
                                          bool aligned) {
  constexpr int kStep = kThreads / 8;  // rows between two copies of a thread
  constexpr int kPanels = kColumns / kPanelColumns;
  static_assert(kRows % kStep == 0 && kStep % 8 == 0);
  const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
  std::uint32_t to = tile + row * kRowBytes + ((chunk ^ row % 8) << 4);
  const char* source = from.data + row * from.stride + chunk * 16;
  if (aligned && count == kRows && columns == kColumns) {
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i) {
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        copy_async_16(to + (panel * kRows + i * kStep) * kRowBytes, source + panel * kRowBytes);
      }
      source += kStep * from.stride;
    }
    return;
  }
#pragma unroll 1
  for (int r = row; r < kRows; r += kStep) {
#pragma unroll 1
    for (int panel = 0; panel < kPanels; ++panel) {
      const bool inside = r < count && panel * kPanelColumns + chunk * kChunk < columns;
      const std::uint32_t at = to + panel * kRows * kRowBytes;
      const char* chunk_source = inside ? source + panel * kRowBytes : from.data;
      if (aligned) {
        copy_async_16_or_zero(at, chunk_source, inside);
        continue;
      }
      std::uint32_t words[4] = {};
      if (inside) {
        const auto* elements = reinterpret_cast<const std::uint16_t*>(chunk_source);
        for (int i = 0; i < 4; ++i) words[i] = elements[2 * i] | std::uint32_t{elements[2 * i + 1]} << 16;
      }
      store_shared_16(at, words);
    }
    to += kStep * kRowBytes;
    source += kStep * from.stride;
  }
}

// The A fragments of the rows from `row` on, all of the tile's columns that k-step `step` needs: [m][k] in memory.
template <int kTiles, int kRows>
__device__ __forceinline__ void load_a(std::uint32_t (&a)[kTiles][4], std::uint32_t tall, int column) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) load_matrices(a[i], fragment_at<kRows>(tall, 16 * i, column));
}

// d += a b for 16 columns of d, whose B fragments are b.
template <DType T, int kTiles, int kColumns>
__device__ __forceinline__ void multiply_pair(float (&d)[kTiles][kColumns][4], int n, const std::uint32_t (&a)[kTiles][4],
                                              const std::uint32_t (&b)[4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    multiply_add<T>(d[i][n], a[i], b[0], b[1]);
    multiply_add<T>(d[i][n + 1], a[i], b[2], b[3]);
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

}  // namespace ringattn::cuda
