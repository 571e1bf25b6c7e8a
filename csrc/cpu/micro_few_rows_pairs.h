// Few query rows of bfloat16 by products of pairs: see micro_pairs.h for what the instruction does to numbers below
// 2^-126. Included by micro.cpp alone.
//
// Scores take neighbours along D as pairs, as they lie in memory. Sums over keys take a pair of keys, so two rows of
// values are put together column by column, which a shift and a blend do for the even columns and for the odd ones.
#pragma once

#include "cpu/micro_few_rows.h"
#include "cpu/micro_pairs.h"

#if defined(__AVX512BF16__)

namespace ringattn::cpu {
namespace {

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

// Whether a number is below 2^-126, but not 0.
bool has_tiny(const std::uint16_t* rows, std::int64_t stride, std::int64_t count, std::int64_t D) {
  const __m512i one = _mm512_set1_epi16(1);
  __m512i least = _mm512_set1_epi16(-1);
  for (std::int64_t n = 0; n < count; ++n, rows += stride) {
    for (std::int64_t d = 0; d < D; d += 32) {
      const __m512i x = _mm512_loadu_si512(rows + d);  // doubled, it has lost its sign, and less one 0 is largest
      least = _mm512_min_epu16(least, _mm512_sub_epi16(_mm512_add_epi16(x, x), one));
    }
  }
  return _mm512_cmplt_epu16_mask(least, _mm512_set1_epi16(2 * 0x80 - 1)) != 0;
}

// P rounded, [rows][2 * kFewRowsKeys], in its own place.
void narrow_weights(const FewRows<float>& tile) {
  constexpr int vectors = kFewRowsKeys / kPairLanes;
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    float* p = tile.p + r * kFewRowsKeys;
    HalfBits narrow[vectors];
    for (int v = 0; v < vectors; ++v) narrow[v] = BFloat16Format::narrow(load<Vector<float>>(p + v * kPairLanes));
    __builtin_memcpy(p, narrow, sizeof(narrow));
  }
}

template <int Rows, int Vectors>
inline void value_pairs_block(const FewRows<float>& tile, std::int64_t r, std::int64_t d, Fetch& fetch) {
  constexpr __mmask32 upper = 0xaaaaaaaau;
  const auto* value = static_cast<const std::uint16_t*>(tile.value) + d;
  const auto* p = reinterpret_cast<const std::uint16_t*>(tile.p + r * kFewRowsKeys);
  __m512 sum[Rows][Vectors];
#pragma GCC unroll 4
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
#pragma GCC unroll 4
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

template <int Vectors>
void add_value_pairs(const FewRows<float>& tile, std::int64_t d, Fetch& fetch) {
  for (; d + Vectors * kPairLanes <= tile.D; d += Vectors * kPairLanes) {
    std::int64_t r = 0;
    for (; r + 4 <= tile.rows; r += 4) value_pairs_block<4, Vectors>(tile, r, d, fetch);
    if (tile.rows - r >= 2) value_pairs_block<2, Vectors>(tile, r, d, fetch), r += 2;
    if (r < tile.rows) value_pairs_block<1, Vectors>(tile, r, d, fetch);
  }
  if constexpr (Vectors > 2) {
    if (d < tile.D) add_value_pairs<Vectors / 2>(tile, d, fetch);
  }
}

// Tiny values are left to products of floats. Tiny keys count as 0: the queries that come as pairs are not so large
// that it would be seen in a score.
void attend_pairs(const FewRows<float>& tile) {
  if (tile.pairs == nullptr) return attend<BFloat16Rows>(tile);
  attend_keys<SumOfPairs>(tile);
  if (has_tiny(static_cast<const std::uint16_t*>(tile.value), tile.value_stride, tile.keys, tile.D)) {
    return attend_values<BFloat16Rows>(tile);
  }
  narrow_weights(tile);
  constexpr int vectors = 4;
  Fetch fetch = next_keys<std::uint16_t>(tile, 2 * vectors);
  add_value_pairs<vectors>(tile, 0, fetch);
}

}  // namespace
}  // namespace ringattn::cpu
#endif
