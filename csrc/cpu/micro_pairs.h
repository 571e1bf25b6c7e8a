// Products of bfloat16 by AVX-512-BF16, where one operation multiplies a pair of neighbouring numbers by another pair
// and adds both products to a float. Included by micro.cpp alone.
//
// The instruction takes numbers below 2^-126 for 0. Rows that hold such, or an infinity or NaN, whose product with the
// weight 0 of a masked pair must not be taken, are left to others: see key_pairs.h.
#pragma once

#include "cpu/micro.h"
#include "cpu/micro_product.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>  // holds no function that is ever emitted

namespace ringattn::cpu {
namespace {

constexpr int kPairLanes = 16;  // floats of a vector
constexpr int kPairRows = 6, kPairVectors = 4;

// 2^f - 1 over f for |f| <= 1/2, a minimax polynomial.
constexpr float kExp2Coefficients[] = {6.931470037e-01f, 2.402224243e-01f, 5.550733581e-02f, 9.671512991e-03f,
                                       1.326472731e-03f};

inline __m512bh pairs_at(const std::uint16_t* source) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(source)); }

inline __m512bh one_pair(const std::uint16_t* source) {
  std::int32_t pair;
  __builtin_memcpy(&pair, source, sizeof(pair));
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}

template <Use use, int Rows, int Vectors>
inline void multiply_pairs_tile(const PairProduct& p, std::int64_t i, std::int64_t j) {
  __m512 sum[Rows][Vectors];
  float* c = p.c + i * p.c_stride + j;
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; ++v) {
    __m512 factor = _mm512_setzero_ps();
    __mmask16 keep = 0;
    if constexpr (use == Use::scale_and_add_to) {
      factor = _mm512_loadu_ps(p.factor + j + v * kPairLanes);
      keep = _mm512_cmp_ps_mask(factor, _mm512_set1_ps(static_cast<float>(kOverwrite)), _CMP_NEQ_UQ);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const float* from = c + r * p.c_stride + v * kPairLanes;
      sum[r][v] = _mm512_setzero_ps();
      if constexpr (use == Use::add_to) sum[r][v] = _mm512_loadu_ps(from);
      if constexpr (use == Use::scale_and_add_to) sum[r][v] = _mm512_maskz_mul_ps(keep, _mm512_loadu_ps(from), factor);
    }
  }
  const std::uint16_t* a = p.a + i * p.a_row_stride;
  const std::uint16_t* b = p.b + 2 * j;
#pragma GCC unroll 2
  for (std::int64_t k = 0; k < p.depth; ++k) {
    __m512bh row[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) row[v] = pairs_at(b + v * 2 * kPairLanes);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const __m512bh pair = one_pair(a + r * p.a_row_stride);
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], row[v], pair);
    }
    a += p.a_depth_stride;
    b += p.b_stride;
  }
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; ++v) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) _mm512_storeu_ps(c + r * p.c_stride + v * kPairLanes, sum[r][v]);
    if constexpr (use == Use::overwrite_and_find_largest) {
      __m512 largest = _mm512_loadu_ps(p.largest + j + v * kPairLanes);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) largest = maximum(sum[r][v], largest);  // the second operand if one is NaN
      _mm512_storeu_ps(p.largest + j + v * kPairLanes, largest);
    }
  }
}

template <Use use, int Rows, int Vectors>
inline void multiply_pairs_last_rows(const PairProduct& p, std::int64_t i, std::int64_t j) {
  if constexpr (Rows > 0) {
    if (p.rows - i == Rows) {
      multiply_pairs_tile<use, Rows, Vectors>(p, i, j);
    } else {
      multiply_pairs_last_rows<use, Rows - 1, Vectors>(p, i, j);
    }
  }
}

template <Use use, int Vectors>
void multiply_pairs_panel(const PairProduct& p, std::int64_t j) {
  std::int64_t i = 0;
  for (; i + kPairRows <= p.rows; i += kPairRows) multiply_pairs_tile<use, kPairRows, Vectors>(p, i, j);
  multiply_pairs_last_rows<use, kPairRows - 1, Vectors>(p, i, j);
}

template <Use use>
void multiply_pairs_panels(const PairProduct& p) {
  std::int64_t j = 0;
  for (; j + kPairVectors * kPairLanes <= p.columns; j += kPairVectors * kPairLanes) {
    multiply_pairs_panel<use, kPairVectors>(p, j);
  }
  switch ((p.columns - j) / kPairLanes) {
    case 3:
      return multiply_pairs_panel<use, 3>(p, j);
    case 2:
      return multiply_pairs_panel<use, 2>(p, j);
    case 1:
      return multiply_pairs_panel<use, 1>(p, j);
    default:
      return;
  }
}

void multiply_pairs(const PairProduct& p) {
  switch (use_of(p)) {
    case Use::overwrite:
      return multiply_pairs_panels<Use::overwrite>(p);
    case Use::overwrite_and_find_largest:
      return multiply_pairs_panels<Use::overwrite_and_find_largest>(p);
    case Use::add_to:
      return multiply_pairs_panels<Use::add_to>(p);
    case Use::scale_and_add_to:
      return multiply_pairs_panels<Use::scale_and_add_to>(p);
  }
}

// For |f| <= 1/2.
inline __m512 exp2_of_pair_fraction(__m512 f) {
  __m512 p = _mm512_set1_ps(kExp2Coefficients[4]);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2Coefficients[3]));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2Coefficients[2]));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2Coefficients[1]));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(kExp2Coefficients[0]));
  return _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
}

// 2^y for y <= 127, with a relative error below 2e-7; NaN stays NaN.
inline __m512 exp2_of_pairs(__m512 y) {
  y = _mm512_max_ps(_mm512_set1_ps(-200.0f), y);  // the second operand if one is NaN
  const __m512 n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_scalef_ps(exp2_of_pair_fraction(_mm512_sub_ps(y, n)), n);
}

// Of 32 numbers: 0, 16, 1, 17, …
inline __m512i alternating() {
  return _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
                          3, 18, 2, 17, 1, 16, 0);
}

// The numbers of two vectors, rounded, in turn.
inline __m512i paired(__m512 even, __m512 odd) {
  return _mm512_permutexvar_epi16(alternating(), reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even)));
}

void column_max_pairs(const float* scores, std::int64_t rows, float* m) {
  __m512 largest[kLanes / kPairLanes];
  __mmask16 is_nan[kLanes / kPairLanes] = {};
  for (int v = 0; v < kLanes / kPairLanes; ++v) largest[v] = _mm512_loadu_ps(m + v * kPairLanes);
  for (std::int64_t n = 0; n < rows; ++n, scores += kLanes) {
#pragma GCC unroll 4
    for (int v = 0; v < kLanes / kPairLanes; ++v) {
      const __m512 s = _mm512_loadu_ps(scores + v * kPairLanes);
      is_nan[v] |= _mm512_cmp_ps_mask(s, s, _CMP_UNORD_Q);
      largest[v] = _mm512_max_ps(s, largest[v]);  // the second operand if one is NaN
    }
  }
  for (int v = 0; v < kLanes / kPairLanes; ++v) {
    const __m512 nan = _mm512_set1_ps(__builtin_nanf(""));
    _mm512_storeu_ps(m + v * kPairLanes, _mm512_mask_mov_ps(largest[v], is_nan[v], nan));
  }
}

// 2^(x * c) for x <= 0, with a relative error below 3e-7; below 2^-126 a number that rounds to the bfloat16 0; NaN
// stays NaN. lowest: -126.9 / c.
inline __m512 exp2_of_pair_product(__m512 x, __m512 c, __m512 lowest) {
  x = maximum(lowest, x);                                 // the second operand if one is NaN
  const __m512 to_integer = _mm512_set1_ps(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the rounded integer
  const __m512 shifted = _mm512_fmadd_ps(x, c, to_integer);
  const __m512 f = _mm512_fmsub_ps(x, c, _mm512_sub_ps(shifted, to_integer));
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(exp2_of_pair_fraction(f)), exponent));
}

bool exponentials_pairs(const float* scores, std::int64_t rows, const float* m, float c, float* sum, std::uint16_t* p) {
  const __m512 factor = _mm512_set1_ps(c);
  const __m512 lowest = _mm512_set1_ps(-126.9f / c);
  __mmask16 is_nan = 0;
  for (std::int64_t lane = 0; lane < kLanes; lane += kPairLanes) {
    const __m512 reference = _mm512_loadu_ps(m + lane);
    __m512 total = _mm512_setzero_ps();
    const auto exponential = [&](std::int64_t n) {
      return exp2_of_pair_product(_mm512_sub_ps(_mm512_loadu_ps(scores + n * kLanes + lane), reference), factor,
                                  lowest);
    };
    for (std::int64_t n = 0; n < rows; n += 2) {
      const __m512 even = exponential(n), odd = exponential(n + 1);
      total = _mm512_add_ps(_mm512_add_ps(total, even), odd);
      _mm512_storeu_si512(p + n * kLanes + 2 * lane, paired(even, odd));
    }
    _mm512_storeu_ps(sum + lane, total);
    is_nan |= _mm512_cmp_ps_mask(total, total, _CMP_UNORD_Q);
  }
  return is_nan == 0;
}

void score_gradients_pairs(const float* scores, const float* gradients, std::int64_t rows, const float* lse2,
                           const float* delta, float c, float scale, std::uint16_t* p, std::uint16_t* ds,
                           std::uint16_t* ds_pairs) {
  const __m512 factor = _mm512_set1_ps(c), weight = _mm512_set1_ps(scale);
  for (std::int64_t lane = 0; lane < kLanes; lane += kPairLanes) {
    const __m512 normaliser = _mm512_loadu_ps(lse2 + lane), shift = _mm512_loadu_ps(delta + lane);
    const auto probability = [&](std::int64_t n) {
      return exp2_of_pairs(_mm512_fmsub_ps(_mm512_loadu_ps(scores + n * kLanes + lane), factor, normaliser));
    };
    const auto store = [&](std::uint16_t* target, std::int64_t n, __m512 even, __m512 odd) {
      const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + n * kLanes + lane), _mm512_castsi512_si256(both));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + (n + 1) * kLanes + lane),
                          _mm512_extracti64x4_epi64(both, 1));
    };
    for (std::int64_t n = 0; n < rows; n += 2) {
      const __m512 p0 = probability(n), p1 = probability(n + 1);
      if (p != nullptr) store(p, n, p0, p1);
      if (gradients == nullptr) continue;
      const auto gradient = [&](std::int64_t row, __m512 probability) {
        const __m512 g = _mm512_sub_ps(_mm512_loadu_ps(gradients + row * kLanes + lane), shift);
        return _mm512_mul_ps(_mm512_mul_ps(probability, g), weight);
      };
      const __m512 ds0 = gradient(n, p0), ds1 = gradient(n + 1, p1);
      if (ds != nullptr) store(ds, n, ds0, ds1);
      if (ds_pairs != nullptr) _mm512_storeu_si512(ds_pairs + n * kLanes + 2 * lane, paired(ds0, ds1));
    }
  }
}

// target[j][i] = {source[2j][i], source[2j + 1][i]}
void pair_rows(const std::uint16_t* source, std::int64_t stride, std::uint16_t* target, std::int64_t rows,
               std::int64_t columns) {
  const __m512i order = alternating();
  for (std::int64_t n = 0; n < rows; n += 2, target += 2 * columns) {
    const std::uint16_t* even = source + n * stride;
    const std::uint16_t* odd = even + stride;
    for (std::int64_t i = 0; i < columns; i += kPairLanes) {
      const __m512i both =
          _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + i))),
                             _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd + i)), 1);
      _mm512_storeu_si512(target + 2 * i, _mm512_permutexvar_epi16(order, both));
    }
  }
}

// Copies rows, with zeros from `columns` to `padded_columns`. Returns whether every number is 0 or has an exponent of
// its own: no infinity, no NaN, nothing below 2^-126.
bool copy_normal(const std::uint16_t* source, std::int64_t source_stride, std::uint16_t* target,
                 std::int64_t target_stride, std::int64_t rows, std::int64_t columns, std::int64_t padded_columns) {
  const __m256i exponent = _mm256_set1_epi16(0x7f80), magnitude = _mm256_set1_epi16(0x7fff);
  __mmask16 special = 0;
  const auto copy = [&](const __m256i& x, std::uint16_t* to) {
    const __mmask16 zero = _mm256_testn_epi16_mask(x, magnitude);
    special |= _mm256_cmpeq_epi16_mask(_mm256_and_si256(x, exponent), exponent);
    special |= _mm256_testn_epi16_mask(x, exponent) & ~zero;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x);
  };
  for (std::int64_t row = 0; row < rows; ++row, source += source_stride, target += target_stride) {
    std::int64_t j = 0;
    for (; j + kPairLanes <= columns; j += kPairLanes) {
      copy(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + j)), target + j);
    }
    for (; j < padded_columns; j += kPairLanes) {
      const std::int64_t left = columns > j ? columns - j : 0;
      copy(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << left) - 1u), source + j), target + j);
    }
  }
  return special == 0;
}

}  // namespace
}  // namespace ringattn::cpu
#endif
