// The products: one register tile of a matrix product serves all of them. Included by micro.cpp alone.
#pragma once

#include "cpu/micro.h"
#include "cpu/micro_vector.h"

namespace ringattn::cpu {
namespace {

// What becomes of c, before and after the sum.
enum class Use { overwrite, overwrite_and_find_largest, add_to, scale_and_add_to };

template <typename Product>
inline Use use_of(const Product& p) {
  if (!p.accumulate) return p.largest == nullptr ? Use::overwrite : Use::overwrite_and_find_largest;
  return p.factor == nullptr ? Use::add_to : Use::scale_and_add_to;
}

template <typename A>
inline Vector<A> scaled(Vector<A> c, Vector<A> factor) {
  return factor == static_cast<A>(kOverwrite) ? Vector<A>{} : c * factor;
}

// Rows x Vectors vectors of c stay in registers while k runs; each step broadcasts Rows elements of a.
template <Use use, int Rows, int Vectors, typename A>
inline void multiply_tile(const Product<A>& p, std::int64_t i, std::int64_t j) {
  using V = Vector<A>;
  constexpr int count = kCount<A>;
  V sum[Rows][Vectors];
  A* c = p.c + i * p.c_stride + j;
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; ++v) {
    V factor = V{};
    if constexpr (use == Use::scale_and_add_to) factor = load<V>(p.factor + j + v * count);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      sum[r][v] = V{};
      if constexpr (use == Use::add_to) sum[r][v] = load<V>(c + r * p.c_stride + v * count);
      if constexpr (use == Use::scale_and_add_to)
        sum[r][v] = scaled<A>(load<V>(c + r * p.c_stride + v * count), factor);
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
  for (int v = 0; v < Vectors; ++v) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) store(c + r * p.c_stride + v * count, sum[r][v]);
    if constexpr (use == Use::overwrite_and_find_largest) {
      V largest = load<V>(p.largest + j + v * count);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) largest = maximum(sum[r][v], largest);
      store(p.largest + j + v * count, largest);
    }
  }
}

// The last rows of a panel, fewer than a register tile has.
template <Use use, int Rows, int Vectors, typename A>
inline void multiply_last_rows(const Product<A>& p, std::int64_t i, std::int64_t j) {
  if constexpr (Rows > 0) {
    if (p.rows - i == Rows) {
      multiply_tile<use, Rows, Vectors>(p, i, j);
    } else {
      multiply_last_rows<use, Rows - 1, Vectors>(p, i, j);
    }
  }
}

template <Use use, int Vectors, typename A>
void multiply_panel(const Product<A>& p, std::int64_t j) {
  std::int64_t i = 0;
  for (; i + kTileRows <= p.rows; i += kTileRows) multiply_tile<use, kTileRows, Vectors>(p, i, j);
  multiply_last_rows<use, kTileRows - 1, Vectors>(p, i, j);
}

template <Use use, typename A>
void multiply_panels(const Product<A>& p) {
  constexpr std::int64_t count = kCount<A>;
  std::int64_t j = 0;
  for (; j + kTileVectors * count <= p.columns; j += kTileVectors * count) multiply_panel<use, kTileVectors>(p, j);
  switch ((p.columns - j) / count) {
    case 3:
      if constexpr (kTileVectors > 3) multiply_panel<use, 3>(p, j);
      break;
    case 2:
      if constexpr (kTileVectors > 2) multiply_panel<use, 2>(p, j);
      break;
    case 1:
      multiply_panel<use, 1>(p, j);
      break;
    default:
      break;
  }
}

template <typename A>
void multiply(const Product<A>& p) {
  switch (use_of(p)) {
    case Use::overwrite:
      return multiply_panels<Use::overwrite>(p);
    case Use::overwrite_and_find_largest:
      return multiply_panels<Use::overwrite_and_find_largest>(p);
    case Use::add_to:
      return multiply_panels<Use::add_to>(p);
    case Use::scale_and_add_to:
      return multiply_panels<Use::scale_and_add_to>(p);
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
