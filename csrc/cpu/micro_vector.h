// Vectors of the instruction set in use, by the vector extensions of gcc and clang. Included by micro.cpp alone.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>  // holds no function that is ever emitted
#endif

namespace ringattn::cpu {
namespace {

// The register tile of a product is kTileRows x kTileVectors accumulators; beside them it needs a row of b and a
// broadcast element of a.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kTileRows = 6, kTileVectors = 4;  // 32 registers
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32, kTileRows = 6, kTileVectors = 2;  // 16 registers
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16, kTileRows = 6, kTileVectors = 4;  // 32 registers
#else
constexpr int kVectorBytes = 16, kTileRows = 4, kTileVectors = 2;  // 16 registers, one of which holds a product
#endif

// Integers of the size of A, which comparisons give and floats are bit-cast to.
template <typename A>
struct VectorTypes;

template <>
struct VectorTypes<float> {
  typedef float Value __attribute__((vector_size(kVectorBytes)));
  typedef std::uint32_t Bits __attribute__((vector_size(kVectorBytes)));
  typedef std::uint16_t Half __attribute__((vector_size(kVectorBytes / 2)));  // as many 16-bit numbers
};

template <>
struct VectorTypes<double> {
  typedef double Value __attribute__((vector_size(kVectorBytes)));
};

template <typename A>
using Vector = typename VectorTypes<A>::Value;
using FloatBits = VectorTypes<float>::Bits;
using HalfBits = VectorTypes<float>::Half;

template <typename A>
constexpr int kCount = kVectorBytes / static_cast<int>(sizeof(A));  // elements of a vector

template <typename V, typename Element>
inline V load(const Element* source) {
  V value;
  __builtin_memcpy(&value, source, sizeof(V));
  return value;
}

template <typename V, typename Element>
inline void store(Element* target, V value) {
  __builtin_memcpy(target, &value, sizeof(V));
}

template <typename A>
inline Vector<A> splat(A value) {
  return value - Vector<A>{};
}

// x > y ? x : y, so y if one of them is NaN.
template <typename V>
inline V maximum(V x, V y) {
  return x > y ? x : y;
}
#if defined(__AVX512F__)
inline Vector<float> maximum(Vector<float> x, Vector<float> y) {
  return reinterpret_cast<Vector<float>>(
      _mm512_maskz_max_ps(0xffff, reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(y)));
}
#elif defined(__AVX2__)
inline Vector<float> maximum(Vector<float> x, Vector<float> y) {
  return reinterpret_cast<Vector<float>>(_mm256_max_ps(reinterpret_cast<__m256>(x), reinterpret_cast<__m256>(y)));
}
#endif

inline FloatBits bits_of(Vector<float> value) { return reinterpret_cast<FloatBits>(value); }
inline Vector<float> float_of(FloatBits bits) { return reinterpret_cast<Vector<float>>(bits); }

}  // namespace
}  // namespace ringattn::cpu
