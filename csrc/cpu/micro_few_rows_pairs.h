// Few query rows of bfloat16 by products of pairs: see micro_pairs.h for what the instruction does to numbers below
// 2^-126. Included by micro.cpp alone.
//
// Scores take neighbours along D as pairs, as they lie in memory: for few rows with lanes along D, for more with a lane
// per key, for which keys are turned. Sums over keys take a pair of keys, so two rows of values are put together column
// by column, which a shift and a blend do for the even columns and for the odd ones.
#pragma once

#include "cpu/micro_few_rows.h"
#include "cpu/micro_pairs.h"

#if defined(__AVX512BF16__)

namespace ringattn::cpu {
namespace {

constexpr int kColumnKeys = kPairLanes;

// Turning keys takes time by D, adding up scores across lanes by rows.
inline bool turns_keys(const FewRows<float>& tile) { return tile.keys >= kColumnKeys && tile.rows * 24 >= tile.D; }

struct SumOfPairs {
  using A = float;
  using Element = std::uint16_t;
  using Part = __m512bh;
  static Part query(const FewRows<A>& tile, std::int64_t r, std::int64_t d) {
    return pairs_at(tile.pairs + r * tile.D + d);
  }
  static Part key(const Element* source) { return pairs_at(source); }
  static void add(Vector<A>& sum, Part query, Part key) {
    sum = reinterpret_cast<Vector<A>>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), query, key));
  }
};

// 16 pairs of each of 16 keys, turned: each column is a pair of the 16 keys, one to a lane. A load brings 128 bits of
// a key to its place, and four keys are turned at once within the lanes of that width.
inline void load_columns(const std::uint16_t* key, std::int64_t stride, __m512i* columns, Fetch& fetch) {
#pragma GCC unroll 4
  for (int quarter = 0; quarter < 4; ++quarter, key += 8) {
    fetch.step();
    __m512i rows[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const auto part = [&](int i) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(key + (j + 4 * i) * stride));
      };
      rows[j] = _mm512_castsi128_si512(part(0));
      rows[j] = _mm512_mask_broadcast_i32x4(rows[j], 0x00f0, part(1));
      rows[j] = _mm512_mask_broadcast_i32x4(rows[j], 0x0f00, part(2));
      rows[j] = _mm512_mask_broadcast_i32x4(rows[j], 0xf000, part(3));
    }
    const __m512i low01 = _mm512_unpacklo_epi32(rows[0], rows[1]), low23 = _mm512_unpacklo_epi32(rows[2], rows[3]);
    const __m512i high01 = _mm512_unpackhi_epi32(rows[0], rows[1]), high23 = _mm512_unpackhi_epi32(rows[2], rows[3]);
    columns[4 * quarter] = _mm512_unpacklo_epi64(low01, low23);
    columns[4 * quarter + 1] = _mm512_unpackhi_epi64(low01, low23);
    columns[4 * quarter + 2] = _mm512_unpacklo_epi64(high01, high23);
    columns[4 * quarter + 3] = _mm512_unpackhi_epi64(high01, high23);
  }
}

// Adds to the scores of `Rows` rows with the keys from n on what columns from d on make of them.
template <int Rows>
inline void score_columns(const FewRows<float>& tile, std::int64_t r, std::int64_t n, std::int64_t d,
                          const __m512i* columns) {
  constexpr int chains = Rows < 4 ? 4 : 2;  // sums of a row that do not wait for each other
  __m512 sum[Rows][chains];
  float* p = tile.p + r * kFewRowsKeys + n;
  const std::uint16_t* query = tile.pairs + r * tile.D + d;
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) {
    sum[i][0] = d == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(p + i * kFewRowsKeys);
#pragma GCC unroll 4
    for (int c = 1; c < chains; ++c) sum[i][c] = _mm512_setzero_ps();
  }
#pragma GCC unroll 16
  for (int pair = 0; pair < kColumnKeys; ++pair) {
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) {
      __m512& to = sum[i][pair % chains];
      to = _mm512_dpbf16_ps(to, reinterpret_cast<__m512bh>(columns[pair]), one_pair(query + i * tile.D + 2 * pair));
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int c = 1; c < chains; ++c) sum[i][0] += sum[i][c];
    _mm512_storeu_ps(p + i * kFewRowsKeys, sum[i][0]);
  }
}

// All scores; meanwhile the values are fetched. Where 16 does not divide the keys, some have their scores twice.
void score_turned_keys(const FewRows<float>& tile) {
  constexpr std::int64_t step = 2 * kPairLanes;
  const auto* keys = static_cast<const std::uint16_t*>(tile.key);
  Fetch fetch(tile.value, tile.value_stride, tile.keys, tile.D, sizeof(std::uint16_t),
              (tile.keys + kColumnKeys - 1) / kColumnKeys * (tile.D / step) * (4 + (tile.rows + 3) / 4));
  for (std::int64_t next = 0; next < tile.keys; next += kColumnKeys) {
    const std::int64_t n = next + kColumnKeys < tile.keys ? next : tile.keys - kColumnKeys;
    for (std::int64_t d = 0; d < tile.D; d += step) {
      __m512i columns[kColumnKeys];
      load_columns(keys + n * tile.key_stride + d, tile.key_stride, columns, fetch);
      std::int64_t r = 0;
      for (; r + 4 <= tile.rows; r += 4) fetch.step(), score_columns<4>(tile, r, n, d, columns);
      if (r == tile.rows) continue;
      fetch.step();
      if (tile.rows - r >= 2) score_columns<2>(tile, r, n, d, columns), r += 2;
      if (r < tile.rows) score_columns<1>(tile, r, n, d, columns);
    }
  }
}

// Whether a number is below 2^-126, but not 0.
bool has_tiny(const std::uint16_t* rows, std::int64_t stride, std::int64_t count, std::int64_t D) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80), mantissa = _mm512_set1_epi16(0x7f);
  __mmask32 any = 0;
  for (std::int64_t n = 0; n < count; ++n, rows += stride) {
    for (std::int64_t d = 0; d < D; d += 32) {
      const __m512i x = _mm512_loadu_si512(rows + d);
      any |= _mm512_mask_test_epi16_mask(_mm512_testn_epi16_mask(x, exponent), x, mantissa);
    }
  }
  return any != 0;
}

// As soften, but leaves P as bfloat16, [rows][2 * kFewRowsKeys], in its own place.
void soften_pairs(const FewRows<float>& tile) {
  using V = Vector<float>;
  constexpr int step = 2 * kPairLanes;
  const float minus_infinity = -__builtin_inff(), bound = -127.0f / tile.c;
  const bool is_finite = bound >= -3e38f;
  const V lowest = splat(bound);
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    float* p = tile.p + r * kFewRowsKeys;
    for (std::int64_t n = tile.keys; n % step != 0; ++n) p[n] = minus_infinity;
    V most[2] = {load<V>(p), load<V>(p + kPairLanes)};
    auto is_nan = (most[0] != most[0]) | (most[1] != most[1]);
    for (std::int64_t n = step; n < tile.keys; n += step) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const V s = load<V>(p + n + v * kPairLanes);
        is_nan |= s != s;
        most[v] = maximum(s, most[v]);
      }
    }
    float largest = across<Maximum>(maximum(most[0], most[1]));
    if (_mm512_movepi32_mask(reinterpret_cast<__m512i>(is_nan)) != 0) largest = __builtin_nanf("");
    const V reference = splat(largest);
    V total[2] = {};
    for (std::int64_t n = 0; n < tile.keys; n += step) {
      V x[2];
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        x[v] = load<V>(p + n + v * kPairLanes) - reference;
        x[v] = is_finite ? exp2_of_product(x[v], tile.c, lowest) : exp2_of(x[v] * tile.c);
        total[v] += x[v];
      }
      const __m512bh both = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(x[1]), reinterpret_cast<__m512>(x[0]));
      _mm512_storeu_si512(reinterpret_cast<std::uint16_t*>(p) + n, reinterpret_cast<__m512i>(both));
    }
    tile.m[r] = largest;
    tile.l[r] = across<Sum>(total[0] + total[1]);
  }
}

// P as soften leaves it, from what soften_pairs left.
void widen_weights(const FewRows<float>& tile) {
  constexpr int vectors = kFewRowsKeys / kPairLanes;
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    float* p = tile.p + r * kFewRowsKeys;
    HalfBits narrow[vectors];
    __builtin_memcpy(narrow, p, sizeof(narrow));
    for (int v = 0; v < vectors; ++v) store(p + v * kPairLanes, BFloat16Format::widen(narrow[v]));
  }
}

template <int Rows, int Vectors>
inline void value_pairs_block(const FewRows<float>& tile, std::int64_t r, std::int64_t d, Fetch& fetch) {
  constexpr __mmask32 upper = 0xaaaaaaaau;
  const auto* value = static_cast<const std::uint16_t*>(tile.value) + d;
  const auto* p = reinterpret_cast<const std::uint16_t*>(tile.p + r * kFewRowsKeys);
  __m512 sum[Rows][Vectors];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) sum[i][v] = _mm512_setzero_ps();
  }
  for (std::int64_t n = 0; n < tile.keys; n += 2, value += 2 * tile.value_stride) {
    fetch.step();
    const bool is_pair = n + 1 < tile.keys;
    __m512bh x[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v += 2) {
      const __m512i one = _mm512_loadu_si512(value + v * kPairLanes);
      const __m512i other =
          is_pair ? _mm512_loadu_si512(value + tile.value_stride + v * kPairLanes) : _mm512_setzero_si512();
      x[v] = reinterpret_cast<__m512bh>(_mm512_mask_blend_epi16(upper, one, _mm512_slli_epi32(other, 16)));
      x[v + 1] = reinterpret_cast<__m512bh>(_mm512_mask_blend_epi16(upper, _mm512_srli_epi32(one, 16), other));
    }
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      const __m512bh weight = one_pair(p + i * 2 * kFewRowsKeys + n);
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) sum[i][v] = _mm512_dpbf16_ps(sum[i][v], x[v], weight);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) {
    float* o = tile.o + (r + i) * tile.D;
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v += 2) {
      _mm512_storeu_ps(o + first_of<BFloat16Rows>(d + v * kPairLanes), sum[i][v]);
      _mm512_storeu_ps(o + second_of<BFloat16Rows>(d + v * kPairLanes, tile.D), sum[i][v + 1]);
    }
  }
}

// How often add_value_pairs walks over the values: by blocks of `Rows` rows, then of half as many, and so on.
template <int Rows>
std::int64_t passes(std::int64_t rows) {
  return rows / Rows + __builtin_popcountll(static_cast<unsigned long long>(rows % Rows));
}

template <int Rows, int Vectors>
void add_value_pairs(const FewRows<float>& tile, std::int64_t r, std::int64_t d, Fetch& fetch) {
  for (; r + Rows <= tile.rows; r += Rows) value_pairs_block<Rows, Vectors>(tile, r, d, fetch);
  if constexpr (Rows > 1) {
    if (r < tile.rows) add_value_pairs<Rows / 2, Vectors>(tile, r, d, fetch);
  }
}

// Tiny values are left to products of floats. Tiny keys count as 0: the queries that come as pairs are not so large
// that it would be seen in a score.
void attend_pairs(const FewRows<float>& tile) {
  if (tile.pairs == nullptr) return attend<BFloat16Rows>(tile);
  if (turns_keys(tile)) {
    score_turned_keys(tile);
  } else {
    score_keys<SumOfPairs>(tile);
  }
  soften_pairs(tile);
  if (has_tiny(static_cast<const std::uint16_t*>(tile.value), tile.value_stride, tile.keys, tile.D)) {
    widen_weights(tile);
    return attend_values<BFloat16Rows>(tile);
  }
  const std::int64_t pairs = (tile.keys + 1) / 2;
  if (tile.rows < 8 && tile.D % (4 * kPairLanes) == 0) {
    Fetch fetch = next_keys<std::uint16_t>(tile, passes<4>(tile.rows) * tile.D / (4 * kPairLanes), pairs);
    for (std::int64_t d = 0; d < tile.D; d += 4 * kPairLanes) add_value_pairs<4, 4>(tile, 0, d, fetch);
  } else {
    Fetch fetch = next_keys<std::uint16_t>(tile, passes<8>(tile.rows) * tile.D / (2 * kPairLanes), pairs);
    for (std::int64_t d = 0; d < tile.D; d += 2 * kPairLanes) add_value_pairs<8, 2>(tile, 0, d, fetch);
  }
}

}  // namespace
}  // namespace ringattn::cpu
#endif
