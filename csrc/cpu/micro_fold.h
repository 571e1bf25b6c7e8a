// Sums and maxima across the lanes of vectors: of one alone, or of as many as have lanes, each into a lane of the
// result. Included by micro.cpp alone.
#pragma once

#include "cpu/micro_convert.h"

namespace ringattn::cpu {
namespace {

struct Sum {
  template <typename V>
  V operator()(V a, V b) const {
    return a + b;
  }
};

// NaN if one is NaN.
struct Maximum {
  template <typename V>
  V operator()(V a, V b) const {
    return (a > b) | (a != a) ? a : b;
  }
};

template <int... I>
struct Lanes {};
template <int Count, int... I>
struct LanesOf : LanesOf<Count - 1, Count - 1, I...> {};
template <int... I>
struct LanesOf<0, I...> {
  typedef Lanes<I...> All;
};

// Of the lanes i and i ^ Half, the result has that of a where i & Half is 0, and that of b elsewhere.
template <typename Operation, int Half, typename V, int... I>
inline V fold(V a, V b, Lanes<I...>) {
  constexpr int count = sizeof...(I);
  return Operation{}(shuffle<(I & Half ? I + count : I)...>(a, b),
                     shuffle<(I & Half ? I - Half + count : I + Half)...>(a, b));
}

// Lane i is of all lanes of vectors[i]. Overwrites them.
template <typename Operation, int Count, typename V>
inline V fold_all(V* vectors) {
  if constexpr (Count == 1) {
    return vectors[0];
  } else {
    constexpr typename LanesOf<sizeof(V) / sizeof(vectors[0][0])>::All lanes;
#pragma GCC unroll 8
    for (int i = 0; i < Count / 2; ++i) {
      vectors[i] = fold<Operation, Count / 2>(vectors[i], vectors[i + Count / 2], lanes);
    }
    return fold_all<Operation, Count / 2>(vectors);
  }
}

// All lanes of one vector together.
template <typename Operation, typename V, int Half = sizeof(V) / sizeof(V{}[0]) / 2>
inline auto across(V v) {
  if constexpr (Half == 0) {
    return v[0];
  } else {
    v = fold<Operation, Half>(v, v, typename LanesOf<sizeof(V) / sizeof(V{}[0])>::All{});
    return across<Operation, V, Half / 2>(v);
  }
}

}  // namespace
}  // namespace ringattn::cpu
