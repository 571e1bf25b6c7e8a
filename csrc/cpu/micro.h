// The table of inner loops that is compiled once per instruction set, and chosen once at run time.
//
// Everything that costs time per pair of a query and a key is here; the kernels above it are plain C++. A tile of
// scores is stored [N][kLanes]: a row per key and a lane per query, so that the statistics of a query row are
// elementwise over lanes and nothing is reduced across a vector; few queries, at the end, have lanes along D instead. A
// is float or double.
//
// This header is included by objects that are compiled for newer CPUs than the rest of the program. It must hold no
// function, and include no header with inline functions: the linker could keep their copy for every CPU.
#pragma once

#include <cstdint>

namespace ringattn::cpu {

inline constexpr std::int64_t kLanes = 64;       // queries of a tile, M
inline constexpr std::int64_t kRowPadding = 16;  // scratch rows are padded with zeros to a multiple of this

// c[i][j] = (accumulate ? c[i][j] : 0) + sum over k of a[i * a_row_stride + k * a_depth_stride] * b[k][j]
//
// for i < rows, k < depth, j < columns. The sum runs upwards in k and is the same chain of operations for an element
// whatever the sizes are. b and c have rows of `columns`, a multiple of kRowPadding, contiguous elements.
//
// factor, where c is added to: it is first multiplied by factor[j], or becomes 0 where that is kOverwrite; null: by
// nothing. largest, where c is not added to: largest[j] becomes the maximum of itself and c[i][j] over i, and NaN may
// be passed over; null: not wanted.
template <typename A>
struct Product {
  A* c;
  std::int64_t c_stride;
  const A* a;
  std::int64_t a_row_stride, a_depth_stride;
  const A* b;
  std::int64_t b_stride;
  std::int64_t rows, depth, columns;
  bool accumulate;
  const A* factor = nullptr;
  A* largest = nullptr;
};

// What P is rounded to before the product with V.
enum class Rounding : std::int32_t { none, bfloat16, float16 };

template <typename A>
struct Micro {
  void (*multiply)(const Product<A>& product);

  // c[i][j] += a[i * a_stride] * b[j] for j in [begin, end): the same operation as a step of multiply, but no lane
  // outside the range is touched.
  void (*add_outer)(A* c, std::int64_t c_stride, const A* a, std::int64_t a_stride, const A* b, std::int64_t rows,
                    std::int64_t begin, std::int64_t end);

  // m[lane] = the maximum of m[lane] and scores[n][lane] over n < rows; NaN if any of them is NaN.
  void (*column_max)(const A* scores /*[rows][kLanes]*/, std::int64_t rows, A* m /*[kLanes]*/);

  // scores = exp2((scores - m) * c), sum[lane] = their sum over n, and then scores are rounded. Scores are at most m.
  // Returns whether no sum is NaN.
  bool (*exponentials)(A* scores /*[rows][kLanes]*/, std::int64_t rows, const A* m, A c, A* sum, Rounding rounding);

  // Moves l from the reference m_old to m_new and adds sum to it; factor[lane] is what o must be multiplied by, or
  // kOverwrite where the old reference was -inf and o must become 0. Lanes with visible[lane] == 0 keep l and get the
  // factor 1; visible may be null: all are. Returns whether any factor differs from 1.
  bool (*advance)(const A* m_old, const A* m_new, A c, const A* visible, const A* sum, A* l, A* factor);

  // o[d][lane] = factor[lane] is kOverwrite ? 0 : o[d][lane] * factor[lane]
  void (*scale_columns)(A* o /*[rows][kLanes]*/, std::int64_t rows, const A* factor);

  // P = exp2(c * scores - lse2), in place of scores, and dS = P * (dP - delta) * scale, in place of gradients (may be
  // null: then only P).
  void (*score_gradients)(A* scores /*[rows][kLanes]*/, A* gradients /*[rows][kLanes]*/, std::int64_t rows,
                          const A* lse2, const A* delta, A c, A scale);

  // target[j][i] = source[i][j]; rows and columns are multiples of 4.
  void (*transpose)(const A* source, std::int64_t source_stride, A* target, std::int64_t target_stride,
                    std::int64_t rows, std::int64_t columns);

  // No element is infinite or NaN.
  bool (*all_finite)(const A* data, std::int64_t stride, std::int64_t rows, std::int64_t columns);
};

inline constexpr int kOverwrite = -1;  // no true factor is negative

// Rows of 16-bit floats to rows of float, and back, rounding to nearest even. Elements are whole numbers of elements
// apart; the target of widen is filled with zeros from `columns` to `padded_columns`.
struct Conversions {
  using Widen = void (*)(const std::uint16_t* source, std::int64_t source_stride, float* target,
                         std::int64_t target_stride, std::int64_t rows, std::int64_t columns,
                         std::int64_t padded_columns);
  using Narrow = void (*)(const float* source, std::uint16_t* target, std::int64_t count);
  Widen widen_bfloat16, widen_float16;
  Narrow narrow_bfloat16, narrow_float16;
};

// Products of bfloat16 numbers, two at a time: c[i][j] = (accumulate ? c[i][j] : 0) + the sum over k of
// a[i][k][0] * b[k][j][0] + a[i][k][1] * b[k][j][1]. A pair of a is two neighbours at a + i * a_row_stride +
// k * a_depth_stride. b has rows of `columns`, a multiple of kRowPadding, pairs. factor and largest are as in Product.
struct PairProduct {
  float* c;
  std::int64_t c_stride;
  const std::uint16_t* a;
  std::int64_t a_row_stride, a_depth_stride;
  const std::uint16_t* b;
  std::int64_t b_stride;
  std::int64_t rows, depth, columns;
  bool accumulate;
  const float* factor = nullptr;
  float* largest = nullptr;
};

// For bfloat16 alone, where the instruction set has such products; null elsewhere. Scores are as in Micro; numbers of
// rows are even. "In pairs" is [rows/2][kLanes][2].
struct Pairs {
  void (*multiply)(const PairProduct& product);

  // As Micro::column_max.
  void (*column_max)(const float* scores, std::int64_t rows, float* m);

  // sum = the sum of exp2((scores - m) * c) over the rows; p = the same rounded, in pairs. Scores are at most m.
  // Returns whether no sum is NaN.
  bool (*exponentials)(const float* scores, std::int64_t rows, const float* m, float c, float* sum, std::uint16_t* p);

  // P = exp2(c * scores - lse2) to p [rows][kLanes]; dS = P * (gradients - delta) * scale to ds [rows][kLanes] and, in
  // pairs, to ds_pairs. What is null is not wanted; without gradients there is no dS.
  void (*score_gradients)(const float* scores, const float* gradients, std::int64_t rows, const float* lse2,
                          const float* delta, float c, float scale, std::uint16_t* p, std::uint16_t* ds,
                          std::uint16_t* ds_pairs);

  // target[j][i] = {source[2j][i], source[2j + 1][i]}; columns: a multiple of kRowPadding.
  void (*pair_rows)(const std::uint16_t* source, std::int64_t stride, std::uint16_t* target, std::int64_t rows,
                    std::int64_t columns);

  // Copies rows, with zeros from `columns` to `padded_columns`. Returns whether all numbers are normal: no infinity, no
  // NaN, none below 2^-126 but 0.
  bool (*copy_normal)(const std::uint16_t* source, std::int64_t source_stride, std::uint16_t* target,
                      std::int64_t target_stride, std::int64_t rows, std::int64_t columns, std::int64_t padded_columns);
};

// Of c in Pairs::exponentials: what is divided by it stays finite.
inline constexpr float kSmallestFactor = 1e-36f;

inline constexpr std::int64_t kFewRowsKeys = 64;     // keys that few rows take at once, at most
inline constexpr std::int64_t kFewRowsPadding = 32;  // their D is a multiple of this

// What a tile of keys alone makes of few query rows:
//   S[r][n] = sum_d query[r][d] * key[n][d]      m[r] = max_n S[r][n]
//   P[r][n] = 2^(c * (S[r][n] - m[r]))           l[r] = sum_n P[r][n]
//   o[r][d] = sum_n round(P[r][n]) * value[n][d]
// Lanes lie along D and along the keys. What is computed of a row does not depend on how many rows there are. Where the
// storage type is bfloat16, query and o have their even columns before their odd ones.
template <typename A>
struct FewRows {
  const void *key, *value;  // [keys][D], in the storage type; strides in elements
  std::int64_t key_stride, value_stride;
  std::int64_t keys;           // 1 to kFewRowsKeys
  const A* query;              // [rows][D]
  const std::uint16_t* pairs;  // the same, as products of pairs take it; or null: they are not wanted
  std::int64_t rows, D;        // D: a multiple of kFewRowsPadding
  A c;
  Rounding rounding;
  A* p;          // [rows][kFewRowsKeys], where scores and weights may be left
  A *o, *m, *l;  // [rows][D], [rows], [rows]
};

template <typename A>
struct FewRowsState {
  A *o, *m, *l;  // [rows][D], [rows], [rows]
};

struct FewRowsLoops {
  void (*attend_float64)(const FewRows<double>& tile);
  void (*attend_float32)(const FewRows<float>& tile);
  void (*attend_bfloat16)(const FewRows<float>& tile);
  void (*attend_float16)(const FewRows<float>& tile);

  // The state absorbs what a tile alone makes of the rows.
  void (*absorb_float64)(const FewRowsState<double>& state, const FewRowsState<double>& tile, std::int64_t rows,
                         std::int64_t D, double c);
  void (*absorb_float32)(const FewRowsState<float>& state, const FewRowsState<float>& tile, std::int64_t rows,
                         std::int64_t D, float c);
};

struct MicroTable {
  Micro<double> float64;
  Micro<float> float32;
  Conversions conversions;
  Pairs pairs;
  FewRowsLoops few_rows;
};

// The table of the instruction set in use.
const MicroTable& micro_table();

}  // namespace ringattn::cpu
