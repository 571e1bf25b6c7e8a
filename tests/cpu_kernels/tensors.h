// Test tensors: values in double, and their image in a storage type with exact-size memory and poisoned gaps.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "core/kernels.h"

namespace ringattn::test {

// The nearest number with `digits` binary digits and no exponent below `lowest`; halves go to even.
inline double round_to(double x, int digits, int lowest, double largest) {
  if (!std::isfinite(x) || x == 0.0) return x;
  const int exponent = std::max(std::ilogb(x), lowest);
  const double quantum = std::ldexp(1.0, exponent - digits + 1);
  const double rounded = std::nearbyint(x / quantum) * quantum;
  return std::abs(rounded) > largest ? std::copysign(std::numeric_limits<double>::infinity(), x) : rounded;
}

inline double round_to(double x, DType dtype) {
  switch (dtype) {
    case DType::float64:
      return x;
    case DType::float32:
      return static_cast<float>(x);
    case DType::bfloat16:
      return round_to(x, 8, -126, 3.3895313892515355e38);
    case DType::float16:
      return round_to(x, 11, -14, 65504.0);
  }
  return x;
}

// Bits of a number of 16 bits: a sign, an exponent and `fraction` bits.
inline double decode16(std::uint16_t bits, int fraction) {
  const int exponent_bits = 15 - fraction, bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits & 0x7fff) >> fraction, mantissa = bits & ((1 << fraction) - 1);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - fraction);
  return sign * std::ldexp(mantissa + (1 << fraction), exponent - bias - fraction);
}

inline std::uint16_t encode16(double x, int fraction) {
  const int exponent_bits = 15 - fraction, bias = (1 << (exponent_bits - 1)) - 1;
  const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const int special = ((1 << exponent_bits) - 1) << fraction;
  if (std::isnan(x)) return sign | special | 1 << (fraction - 1);
  const double rounded = std::abs(round_to(x, fraction == 7 ? DType::bfloat16 : DType::float16));
  if (std::isinf(rounded)) return sign | special;
  if (rounded < std::ldexp(1.0, 1 - bias)) return sign | static_cast<int>(std::ldexp(rounded, bias + fraction - 1));
  const int exponent = std::ilogb(rounded);
  return sign | ((exponent + bias) << fraction) |
         (static_cast<int>(std::ldexp(rounded, fraction - exponent)) - (1 << fraction));
}

inline std::size_t size_of(DType dtype) { return dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2; }

inline DType accumulator_of(DType dtype) { return dtype == DType::float64 ? DType::float64 : DType::float32; }

enum class Memory {
  contiguous,  // [B, H, S, D]
  transposed,  // [B, S, H, D]
  gapped,      // rows longer than D, NaN in the gaps
  expanded,    // one token for all: strides of 0
  shared,      // the same tokens in all batches and heads: strides of 0 there
};

struct Tensor {
  DType dtype = DType::float32;
  std::int64_t B = 0, H = 0, S = 0, D = 0;
  Rows rows;
  std::vector<std::byte> bytes;  // no more than needed: an access behind the last row is outside of the allocation

  Tensor(DType dtype, std::int64_t B, std::int64_t H, std::int64_t S, std::int64_t D, Memory memory)
      : dtype(dtype), B(B), H(H), S(S), D(D) {
    std::int64_t elements = B * H * S * D;
    if (memory == Memory::contiguous) rows = {nullptr, H * S * D, S * D, D};
    if (memory == Memory::transposed) rows = {nullptr, H * S * D, D, H * D};
    if (memory == Memory::gapped) {
      rows = {nullptr, H * S * (D + 3) + 5, S * (D + 3), D + 3};
      elements = elements == 0 ? 0 : (B - 1) * rows.batch_stride + (H - 1) * rows.head_stride + (S - 1) * (D + 3) + D;
    }
    if (memory == Memory::expanded) elements = D;
    if (memory == Memory::shared) {
      rows = {nullptr, 0, 0, D};
      elements = S * D;
    }
    bytes.resize(static_cast<std::size_t>(elements) * size_of(dtype));
    rows.data = bytes.data();
    for (std::int64_t i = 0; i < elements; ++i) write(i, std::numeric_limits<double>::quiet_NaN());
  }
  Tensor(const Tensor&) = delete;

  std::int64_t offset(std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d) const {
    return b * rows.batch_stride + h * rows.head_stride + s * rows.token_stride + d;
  }

  void write(std::int64_t offset, double value) {
    std::byte* target = bytes.data() + static_cast<std::size_t>(offset) * size_of(dtype);
    if (dtype == DType::float64) {
      std::memcpy(target, &value, 8);
    } else if (dtype == DType::float32) {
      const float narrowed = static_cast<float>(value);
      std::memcpy(target, &narrowed, 4);
    } else {
      const std::uint16_t narrowed = encode16(value, dtype == DType::bfloat16 ? 7 : 10);
      std::memcpy(target, &narrowed, 2);
    }
  }

  double read(std::int64_t offset) const {
    const std::byte* source = bytes.data() + static_cast<std::size_t>(offset) * size_of(dtype);
    if (dtype == DType::float64) {
      double value;
      std::memcpy(&value, source, 8);
      return value;
    }
    if (dtype == DType::float32) {
      float value;
      std::memcpy(&value, source, 4);
      return value;
    }
    std::uint16_t value;
    std::memcpy(&value, source, 2);
    return decode16(value, dtype == DType::bfloat16 ? 7 : 10);
  }

  double at(std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d) const { return read(offset(b, h, s, d)); }
  void set(std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d, double x) { write(offset(b, h, s, d), x); }

  template <typename Function>
  void for_each(const Function& function) const {
    for (std::int64_t b = 0; b < B; ++b) {
      for (std::int64_t h = 0; h < H; ++h) {
        for (std::int64_t s = 0; s < S; ++s) {
          for (std::int64_t d = 0; d < D; ++d) function(b, h, s, d);
        }
      }
    }
  }

  void fill(double value) {
    for_each([&](auto b, auto h, auto s, auto d) { set(b, h, s, d, value); });
  }

  // Sums of four uniform numbers: nearly normal, and drawn faster. The factor gives them all their binary digits.
  void fill_normal(std::mt19937_64& random, double deviation = 1.0) {
    const double factor = std::sqrt(3.0) / 65536 * deviation;
    for_each([&](auto b, auto h, auto s, auto d) {
      const std::uint64_t bits = random();
      const std::uint64_t sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
      set(b, h, s, d, (static_cast<double>(sum) - 131070.0) * factor);
    });
  }

  // Whether what lies between the rows is still what it was at first.
  bool gaps_are_nan() const {
    const std::int64_t elements = static_cast<std::int64_t>(bytes.size() / size_of(dtype));
    if (elements == B * H * S * D) return true;
    std::vector<bool> in_row(static_cast<std::size_t>(elements));
    for_each([&](auto b, auto h, auto s, auto d) { in_row[static_cast<std::size_t>(offset(b, h, s, d))] = true; });
    for (std::int64_t i = 0; i < elements; ++i) {
      if (!in_row[static_cast<std::size_t>(i)] && !std::isnan(read(i))) return false;
    }
    return true;
  }
};

}  // namespace ringattn::test
