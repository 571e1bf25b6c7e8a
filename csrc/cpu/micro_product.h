// The products: one register tile of a matrix product serves all of them. Included by micro.cpp alone.
#pragma once

#include "cpu/micro.h"
#include "cpu/micro_vector.h"

namespace ringattn::cpu {
namespace {

// Rows x Vectors vectors of c stay in registers while k runs; each step broadcasts Rows elements of a.
template <typename A, int Rows, int Vectors>
inline void multiply_tile(const Product<A>& p, std::int64_t i, std::int64_t j) {
  using V = Vector<A>;
  constexpr int count = kCount<A>;
  V sum[Rows][Vectors];
  A* c = p.c + i * p.c_stride + j;
  if (p.accumulate) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) sum[r][v] = load<V>(c + r * p.c_stride + v * count);
    }
  } else {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) sum[r][v] = V{};
    }
  }

  const A* a[Rows];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) a[r] = p.a + (i + r) * p.a_row_stride;
  const A* b = p.b + j;
  for (std::int64_t k = 0; k < p.depth; ++k) {
    V row[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) row[v] = load<V>(b + v * count);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const V element = splat<A>(*a[r]);
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) sum[r][v] += element * row[v];
      a[r] += p.a_depth_stride;
    }
    b += p.b_stride;
  }

#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) store(c + r * p.c_stride + v * count, sum[r][v]);
  }
}

// The last rows of a panel, fewer than a register tile has.
template <typename A, int Rows, int Vectors>
inline void multiply_last_rows(const Product<A>& p, std::int64_t i, std::int64_t j) {
  if constexpr (Rows > 0) {
    if (p.rows - i == Rows) {
      multiply_tile<A, Rows, Vectors>(p, i, j);
    } else {
      multiply_last_rows<A, Rows - 1, Vectors>(p, i, j);
    }
  }
}

template <typename A, int Vectors>
void multiply_panel(const Product<A>& p, std::int64_t j) {
  std::int64_t i = 0;
  for (; i + kTileRows <= p.rows; i += kTileRows) multiply_tile<A, kTileRows, Vectors>(p, i, j);
  multiply_last_rows<A, kTileRows - 1, Vectors>(p, i, j);
}

template <typename A>
void multiply(const Product<A>& p) {
  constexpr std::int64_t count = kCount<A>;
  std::int64_t j = 0;
  for (; j + kTileVectors * count <= p.columns; j += kTileVectors * count) multiply_panel<A, kTileVectors>(p, j);
  switch ((p.columns - j) / count) {
    case 3:
      if constexpr (kTileVectors > 3) multiply_panel<A, 3>(p, j);
      break;
    case 2:
      if constexpr (kTileVectors > 2) multiply_panel<A, 2>(p, j);
      break;
    case 1:
      multiply_panel<A, 1>(p, j);
      break;
    default:
      break;
  }
}

template <typename A>
void add_outer(A* c, std::int64_t c_stride, const A* a, std::int64_t a_stride, const A* b, std::int64_t rows,
               std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = 0; i < rows; ++i) {
    const A element = a[i * a_stride];
    for (std::int64_t j = begin; j < end; ++j) c[i * c_stride + j] += element * b[j];
  }
}

}  // namespace
}  // namespace ringattn::cpu
