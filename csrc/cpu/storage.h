// The types that inputs and outputs are stored in, and how rows of them become rows of the accumulation type.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/kernels.h"
#include "cpu/micro.h"

namespace ringattn::cpu {

struct BFloat16 {
  std::uint16_t bits;
};

struct Float16 {
  std::uint16_t bits;
};

// A of a storage type T.
template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
inline constexpr bool kIsAccumulator = std::is_same_v<T, Accumulator<T>>;

template <typename T>
inline constexpr Rounding kRounding = std::is_same_v<T, BFloat16>  ? Rounding::bfloat16
                                      : std::is_same_v<T, Float16> ? Rounding::float16
                                                                   : Rounding::none;

template <typename A>
const Micro<A>& micro() {
  if constexpr (std::is_same_v<A, double>) {
    return micro_table().float64;
  } else {
    return micro_table().float32;
  }
}

inline std::int64_t padded(std::int64_t count) { return (count + kRowPadding - 1) / kRowPadding * kRowPadding; }

// Consecutive tokens of one head.
template <typename T>
struct RowSpan {
  T* data;
  std::int64_t stride;

  T* row(std::int64_t index) const { return data + index * stride; }
};

template <typename T>
RowSpan<T> rows_at(const Rows& rows, std::int64_t b, std::int64_t h, std::int64_t token) {
  return {static_cast<T*>(rows.data) + b * rows.batch_stride + h * rows.head_stride + token * rows.token_stride,
          rows.token_stride};
}

// Copies rows to scratch with a row length of padded(D), zeros beyond D.
template <typename T>
void copy_rows(RowSpan<const T> source, std::int64_t count, std::int64_t D, Accumulator<T>* target) {
  const std::int64_t length = padded(D);
  if constexpr (kIsAccumulator<T>) {
    for (std::int64_t i = 0; i < count; ++i, target += length) {
      std::copy_n(source.row(i), D, target);
      std::fill(target + D, target + length, T{0});
    }
  } else {
    const Conversions& conversions = micro_table().conversions;
    const auto widen = std::is_same_v<T, BFloat16> ? conversions.widen_bfloat16 : conversions.widen_float16;
    widen(reinterpret_cast<const std::uint16_t*>(source.data), source.stride, target, length, count, D, length);
  }
}

// Rows in A: the given ones if they are in A already, else a copy in scratch.
template <typename T>
RowSpan<const Accumulator<T>> rows_in_accumulator(RowSpan<const T> source, std::int64_t count, std::int64_t D,
                                                  Accumulator<T>* scratch) {
  if constexpr (kIsAccumulator<T>) {
    return source;
  } else {
    copy_rows<T>(source, count, D, scratch);
    return {scratch, padded(D)};
  }
}

// Rounds one row to T.
template <typename T>
void store_row(const Accumulator<T>* source, T* target, std::int64_t D) {
  if constexpr (kIsAccumulator<T>) {
    std::copy_n(source, D, target);
  } else {
    const Conversions& conversions = micro_table().conversions;
    const auto narrow = std::is_same_v<T, BFloat16> ? conversions.narrow_bfloat16 : conversions.narrow_float16;
    narrow(source, reinterpret_cast<std::uint16_t*>(target), D);
  }
}

}  // namespace ringattn::cpu
