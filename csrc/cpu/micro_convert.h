// Conversions of 16-bit floats, transposition and the search for NaN. Included by micro.cpp alone.
//
// The float16 formulas are the well-known bit manipulations that let the floating-point unit round and normalise:
// adding a power of two to a small number aligns its mantissa as a denormal float16 stores it.
#pragma once

#include "cpu/micro_vector.h"

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>  // holds no function that is ever emitted
#endif

namespace ringattn::cpu {
namespace {

struct BFloat16Format {
  static Vector<float> widen(HalfBits half) { return float_of(__builtin_convertvector(half, FloatBits) << 16); }

  static FloatBits rounded_bits(Vector<float> x) {
    const FloatBits u = bits_of(x);
    const FloatBits rounded = u + 0x7fffu + ((u >> 16) & 1u);
    return x == x ? rounded : u | 0x00400000u;  // NaN stays NaN and becomes a quiet one
  }
  static HalfBits narrow(Vector<float> x) { return __builtin_convertvector(rounded_bits(x) >> 16, HalfBits); }
  static Vector<float> round(Vector<float> x) { return float_of(rounded_bits(x) & 0xffff0000u); }
};

struct Float16Format {
#if defined(__AVX512F__)
  static Vector<float> widen(HalfBits half) {
    return reinterpret_cast<Vector<float>>(_mm512_maskz_cvtph_ps(0xffff, reinterpret_cast<__m256i>(half)));
  }
  static HalfBits narrow(Vector<float> x) {
    return reinterpret_cast<HalfBits>(
        _mm512_maskz_cvtps_ph(0xffff, reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
  }
#elif defined(__F16C__)
  static Vector<float> widen(HalfBits half) {
    return reinterpret_cast<Vector<float>>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(half)));
  }
  static HalfBits narrow(Vector<float> x) {
    return reinterpret_cast<HalfBits>(_mm256_cvtps_ph(reinterpret_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT));
  }
#else
  static Vector<float> widen(HalfBits half) {
    const FloatBits h = __builtin_convertvector(half, FloatBits);
    const FloatBits magnitude = (h & 0x7fffu) << 13, exponent = magnitude & (0x7c00u << 13);
    const FloatBits normal = magnitude + ((127u - 15u) << 23);
    const FloatBits special = normal + ((128u - 16u) << 23);  // infinity and NaN
    const Vector<float> smallest_normal = splat(6.103515625e-05f);
    const FloatBits denormal = bits_of(float_of(normal + (1u << 23)) - smallest_normal);
    const FloatBits unsigned_bits = exponent == (0x7c00u << 13) ? special : exponent == 0u ? denormal : normal;
    return float_of(unsigned_bits | (h & 0x8000u) << 16);
  }
  static HalfBits narrow(Vector<float> x) {
    const FloatBits u = bits_of(x), magnitude = u & 0x7fffffffu;
    const FloatBits normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const FloatBits half_ulp = FloatBits{} + (((127u - 15u) + (23u - 10u) + 1u) << 23);
    const FloatBits denormal = bits_of(float_of(magnitude) + float_of(half_ulp)) - half_ulp;
    const FloatBits infinity = FloatBits{} + 0x7c00u, quiet_nan = FloatBits{} + 0x7e00u;
    const FloatBits special = magnitude > (255u << 23) ? quiet_nan : infinity;
    const FloatBits finite = magnitude < ((127u - 14u) << 23) ? denormal : normal;
    const FloatBits result = magnitude >= ((127u + 16u) << 23) ? special : finite;
    return __builtin_convertvector(result | (u >> 16 & 0x8000u), HalfBits);
  }
#endif
  static Vector<float> round(Vector<float> x) { return widen(narrow(x)); }
};

template <typename Format>
void widen_rows(const std::uint16_t* source, std::int64_t source_stride, float* target, std::int64_t target_stride,
                std::int64_t rows, std::int64_t columns, std::int64_t padded_columns) {
  constexpr int count = kCount<float>;
  for (std::int64_t row = 0; row < rows; ++row, source += source_stride, target += target_stride) {
    std::int64_t j = 0;
    for (; j + count <= columns; j += count) store(target + j, Format::widen(load<HalfBits>(source + j)));
    if (j < columns) {  // never reads beyond the row, may write beyond `columns`: the padding takes whole vectors
      std::uint16_t last[count] = {};
      for (std::int64_t i = j; i < columns; ++i) last[i - j] = source[i];
      store(target + j, Format::widen(load<HalfBits>(last)));
      j += count;
    }
    for (; j < padded_columns; ++j) target[j] = 0.0f;
  }
}

template <typename Format>
void narrow_row(const float* source, std::uint16_t* target, std::int64_t columns) {
  constexpr int count = kCount<float>;
  std::int64_t j = 0;
  for (; j + count <= columns; j += count) store(target + j, Format::narrow(load<Vector<float>>(source + j)));
  if (j < columns) {
    float last[count] = {};
    for (std::int64_t i = j; i < columns; ++i) last[i - j] = source[i];
    const HalfBits narrowed = Format::narrow(load<Vector<float>>(last));
    for (std::int64_t i = j; i < columns; ++i) target[i] = narrowed[i - j];
  }
}

template <int... Indices, typename V>
inline V shuffle(V first, V second) {
#if defined(__clang__)
  return __builtin_shufflevector(first, second, Indices...);
#else
  typedef decltype(first < second) Index;
  return __builtin_shuffle(first, second, Index{Indices...});
#endif
}

template <typename A>
void transpose(const A* source, std::int64_t source_stride, A* target, std::int64_t target_stride, std::int64_t rows,
               std::int64_t columns) {
  for (std::int64_t j = 0; j < columns; j += 4) {
    for (std::int64_t i = 0; i < rows; i += 4) {
      const A* from = source + i * source_stride + j;
      A* to = target + j * target_stride + i;
      if constexpr (sizeof(A) == sizeof(float)) {
        typedef A Four __attribute__((vector_size(16)));
        const Four r0 = load<Four>(from), r1 = load<Four>(from + source_stride);
        const Four r2 = load<Four>(from + 2 * source_stride), r3 = load<Four>(from + 3 * source_stride);
        const Four t0 = shuffle<0, 4, 1, 5>(r0, r1), t1 = shuffle<2, 6, 3, 7>(r0, r1);
        const Four t2 = shuffle<0, 4, 1, 5>(r2, r3), t3 = shuffle<2, 6, 3, 7>(r2, r3);
        store(to, shuffle<0, 1, 4, 5>(t0, t2));
        store(to + target_stride, shuffle<2, 3, 6, 7>(t0, t2));
        store(to + 2 * target_stride, shuffle<0, 1, 4, 5>(t1, t3));
        store(to + 3 * target_stride, shuffle<2, 3, 6, 7>(t1, t3));
      } else {
        for (int x = 0; x < 4; ++x) {
          for (int y = 0; y < 4; ++y) to[x * target_stride + y] = from[y * source_stride + x];
        }
      }
    }
  }
}

template <typename A>
bool all_finite(const A* data, std::int64_t stride, std::int64_t rows, std::int64_t columns) {
  using V = Vector<A>;
  V sum = V{};  // x * 0 is NaN if x is NaN or infinite
  A rest = 0;
  for (std::int64_t row = 0; row < rows; ++row, data += stride) {
    std::int64_t j = 0;
    for (; j + kCount<A> <= columns; j += kCount<A>) sum += load<V>(data + j) * A{0};
    for (; j < columns; ++j) rest += data[j] * A{0};
  }
  for (int i = 0; i < kCount<A>; ++i) rest += sum[i];
  return rest == A{0};
}

}  // namespace
}  // namespace ringattn::cpu
