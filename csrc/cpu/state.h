// The state (o, m, l) of query rows, and the kernels that work on it alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/kernels.h"
#include "cpu/storage.h"

namespace ringattn::cpu {

// Each is instantiated for the four storage types.
template <typename T>
void finalize(const BlockArgs& args, const Launch& launch);
template <typename T>
void merge(const BlockArgs& args, const Launch& launch);
template <typename T>
void delta(const BlockArgs& args, const Launch& launch);

inline constexpr double kLog2E = 1.4426950408889634;

template <typename A>
inline constexpr A kMinusInfinity = -std::numeric_limits<A>::infinity();

// Where the state of token 0 of a head lies among the [B, Hq, Sq] rows of m, l, lse and delta.
inline std::int64_t state_row(const BlockArgs& args, std::int64_t b, std::int64_t h) {
  return (b * args.Hq + h) * args.Sq;
}

// out = o / l and lse = scale * m + ln l of one row, which is 0 and -inf if the row has seen no key. Overwrites o.
template <typename T>
void finish_row(Accumulator<T>* o, Accumulator<T> m, Accumulator<T> l, double scale, std::int64_t D, T* out,
                Accumulator<T>* lse) {
  using A = Accumulator<T>;
  if (l == A{0}) {
    std::fill_n(o, D, A{0});
    *lse = kMinusInfinity<A>;
  } else {
    for (std::int64_t d = 0; d < D; ++d) o[d] /= l;
    *lse = static_cast<A>(scale * static_cast<double>(m) + std::log(static_cast<double>(l)));
  }
  store_row<T>(o, out, D);
}

}  // namespace ringattn::cpu
