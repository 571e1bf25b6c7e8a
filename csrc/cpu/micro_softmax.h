// The softmax: running statistics, exponentials and their gradients, over tiles [rows][kLanes]. Included by micro.cpp
// alone.
#pragma once

#include "cpu/micro.h"
#include "cpu/micro_convert.h"
#include "cpu/micro_vector.h"

namespace ringattn::cpu {
namespace {

extern "C" double exp2(double);

// For |f| <= 1/2, a minimax polynomial.
inline Vector<float> exp2_of_fraction(Vector<float> f) {
  Vector<float> p = splat(1.535336202e-04f);
  p = p * f + 1.339887448e-03f;
  p = p * f + 9.618437358e-03f;
  p = p * f + 5.550332471e-02f;
  p = p * f + 2.402264791e-01f;
  p = p * f + 6.931472029e-01f;
  p = p * f + 1.0f;
  return p;
}

// 2^y with a relative error below 1e-7 for y in [-126.5, 127.5): y = n + f with |f| <= 1/2; 2^n is built from its
// exponent bits. Smaller results are 0, larger ones infinite, NaN stays NaN.
inline Vector<float> exp2_of(Vector<float> y) {
  using V = Vector<float>;
  // The bounds stand first: a comparison with NaN is false and must choose y.
  const V low = splat(-127.0f), high = splat(128.0f);
  y = low > y ? low : y;
  y = high < y ? high : y;
  const V to_integer = splat(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the rounded integer
  const V shifted = y + to_integer;
  const V f = y - (shifted - to_integer);
  const V p = exp2_of_fraction(f);
  const V power = float_of((bits_of(shifted) + 127u) << 23);  // the exponent of n = -127 is that of zero
  return p * power;
}

inline Vector<double> exp2_of(Vector<double> y) {
  Vector<double> result;
  for (int i = 0; i < kCount<double>; ++i) result[i] = exp2(y[i]);
  return result;
}

template <typename A>
void column_max(const A* scores, std::int64_t rows, A* m) {
  using V = Vector<A>;
  for (std::int64_t lane = 0; lane < kLanes; lane += kCount<A>) {
    V largest = load<V>(m + lane);
    for (std::int64_t n = 0; n < rows; ++n) {
      const V s = load<V>(scores + n * kLanes + lane);
      largest = (s > largest) | (s != s) ? s : largest;
    }
    store(m + lane, largest);
  }
}

// 2^(x * c) for x <= 0, as exact as exp2_of. lowest: -127 / c.
inline Vector<float> exp2_of_product(Vector<float> x, float c, Vector<float> lowest) {
  using V = Vector<float>;
  x = maximum(lowest, x);
  // 1.5 * 2^23 + 127: the sum's low bits are the rounded integer with the bias of an exponent.
  const V to_integer = splat(12583039.0f);
  const V shifted = x * c + to_integer;
  const V f = x * c - (shifted - to_integer);
  return exp2_of_fraction(f) * float_of(bits_of(shifted) << 23);  // the exponent of n = -127 is that of zero
}

inline Vector<double> exp2_of_product(Vector<double> x, double c, Vector<double>) { return exp2_of(x * c); }

template <typename A, Rounding rounding>
bool exponentials_rounded(A* scores, std::int64_t rows, const A* m, A c, A* sum) {
  using V = Vector<A>;
  const A bound = static_cast<A>(-127) / c;
  const bool is_finite = bound >= static_cast<A>(-3e38f);
  const V lowest = splat(bound);
  bool no_nan = true;
  for (std::int64_t lane = 0; lane < kLanes; lane += kCount<A>) {
    const V reference = load<V>(m + lane);
    V total = V{};
    A* s = scores + lane;
    for (std::int64_t n = 0; n < rows; ++n, s += kLanes) {
      const V x = load<V>(s) - reference;
      V p = is_finite ? exp2_of_product(x, c, lowest) : exp2_of(x * c);
      total += p;
      if constexpr (rounding == Rounding::bfloat16) p = BFloat16Format::round(p);
      if constexpr (rounding == Rounding::float16) p = Float16Format::round(p);
      store(s, p);
    }
    store(sum + lane, total);
    const auto is_nan = total != total;
    for (int i = 0; i < kCount<A>; ++i) no_nan &= is_nan[i] == 0;
  }
  return no_nan;
}

template <typename A>
bool exponentials(A* scores, std::int64_t rows, const A* m, A c, A* sum, Rounding rounding) {
  if constexpr (sizeof(A) == sizeof(float)) {
    if (rounding == Rounding::bfloat16) return exponentials_rounded<A, Rounding::bfloat16>(scores, rows, m, c, sum);
    if (rounding == Rounding::float16) return exponentials_rounded<A, Rounding::float16>(scores, rows, m, c, sum);
  }
  return exponentials_rounded<A, Rounding::none>(scores, rows, m, c, sum);
}

template <typename A>
bool advance(const A* m_old, const A* m_new, A c, const A* visible, const A* sum, A* l, A* factor) {
  using V = Vector<A>;
  const V infinity = splat(static_cast<A>(__builtin_inf()));
  const V one = splat(A{1}), overwrite = splat(static_cast<A>(kOverwrite));
  auto changed = one != one;
  for (std::int64_t lane = 0; lane < kLanes; lane += kCount<A>) {
    const V before = load<V>(m_old + lane);
    V f = exp2_of((before - load<V>(m_new + lane)) * c);
    const V carried = load<V>(l + lane), added = load<V>(sum + lane);
    const auto empty = before == -infinity;
    V total = empty ? added : carried * f + added;
    f = empty ? overwrite : f;
    if (visible != nullptr) {
      const auto sees = load<V>(visible + lane) != V{};
      total = sees ? total : carried;
      f = sees ? f : one;
    }
    store(l + lane, total);
    store(factor + lane, f);
    changed |= f != one;
  }
  bool any = false;
  for (int i = 0; i < kCount<A>; ++i) any |= changed[i] != 0;
  return any;
}

template <typename A>
void scale_columns(A* o, std::int64_t rows, const A* factor) {
  using V = Vector<A>;
  for (std::int64_t lane = 0; lane < kLanes; lane += kCount<A>) {
    const V f = load<V>(factor + lane);
    const auto overwrite = f == static_cast<A>(kOverwrite);
    for (std::int64_t d = 0; d < rows; ++d) {
      A* target = o + d * kLanes + lane;
      store(target, overwrite ? V{} : load<V>(target) * f);
    }
  }
}

template <typename A>
void score_gradients(A* scores, A* gradients, std::int64_t rows, const A* lse2, const A* delta, A c, A scale) {
  using V = Vector<A>;
  for (std::int64_t lane = 0; lane < kLanes; lane += kCount<A>) {
    const V normaliser = load<V>(lse2 + lane), shift = load<V>(delta + lane);
    for (std::int64_t n = 0; n < rows; ++n) {
      A* s = scores + n * kLanes + lane;
      const V p = exp2_of(load<V>(s) * c - normaliser);
      store(s, p);
      if (gradients == nullptr) continue;
      A* g = gradients + n * kLanes + lane;
      store(g, p * (load<V>(g) - shift) * scale);
    }
  }
}

}  // namespace
}  // namespace ringattn::cpu
