// Numbers of the narrow float formats, and rounding of a double into any of them in any direction.
//
// Sums and fused products of narrow numbers are computed in double and rounded to odd there: a second rounding to the
// narrow format then gives the correctly rounded result.
#pragma once

#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <string>

namespace emulator {

enum class Round : uint8_t { nearest, zero, down, up, away };

inline Round round_named(const std::string& word) {  // of .rn .rz .rm .rp .rna and .rni .rzi .rmi .rpi
  switch (word.size() > 1 ? word[1] : 'n') {
    case 'z':
      return Round::zero;
    case 'm':
      return Round::down;
    case 'p':
      return Round::up;
    default:
      return word == "rna" ? Round::away : Round::nearest;
  }
}

struct Format {
  int exponent_bits, mantissa_bits;
  bool has_infinity = true;  // e4m3 has none: its largest code is the NaN
};
constexpr Format kHalf{5, 10}, kBfloat{8, 7}, kTf32{8, 10}, kSingle{8, 23}, kE4m3{4, 3, false}, kE5m2{5, 2};

// The code of value, rounded. saturate: the largest finite number stands for everything above it.
inline uint32_t encode(double value, Format format, Round round, bool saturate = false) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const uint32_t sign = static_cast<uint32_t>(std::signbit(value)) << (format.exponent_bits + format.mantissa_bits);
  const uint32_t top = ((1u << format.exponent_bits) - 1) << format.mantissa_bits;
  const uint32_t largest = format.has_infinity ? top - 1 : (top | ((1u << format.mantissa_bits) - 1)) - 1;
  if (std::isnan(value)) return top | ((1u << format.mantissa_bits) - 1);
  if (std::isinf(value)) return sign | (saturate || !format.has_infinity ? largest : top);
  const double size = std::fabs(value);
  if (size == 0) return sign;
  const int exponent = std::max(static_cast<int>(std::bit_cast<uint64_t>(size) >> 52) - 1023, 1 - bias);
  const double scaled = std::ldexp(size, format.mantissa_bits - exponent), whole = std::floor(scaled);
  const double rest = scaled - whole;
  double count = whole;
  switch (round) {
    case Round::nearest:
      if (rest > 0.5 || (rest == 0.5 && std::fmod(whole, 2) != 0)) ++count;
      break;
    case Round::away:
      count += rest >= 0.5;
      break;
    case Round::zero:
      break;
    case Round::down:
      count += sign && rest > 0;
      break;
    case Round::up:
      count += !sign && rest > 0;
      break;
  }
  const uint64_t code =
      static_cast<uint64_t>(count) + (static_cast<uint64_t>(exponent + bias - 1) << format.mantissa_bits);
  if (code > largest) {
    const bool stays = saturate || !format.has_infinity || round == Round::zero || (round == Round::down && !sign) ||
                       (round == Round::up && sign);
    return sign | (stays ? largest : top);
  }
  return sign | static_cast<uint32_t>(code);
}

inline double decode_number(uint32_t code, Format format) {
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const uint32_t mantissa = code & ((1u << format.mantissa_bits) - 1);
  const int exponent = static_cast<int>(code >> format.mantissa_bits & ((1u << format.exponent_bits) - 1));
  const bool negative = code >> (format.exponent_bits + format.mantissa_bits) & 1;
  double value;
  if (format.has_infinity && exponent == (1 << format.exponent_bits) - 1) {
    value = mantissa ? NAN : INFINITY;
  } else if (!format.has_infinity && exponent == (1 << format.exponent_bits) - 1 &&
             mantissa == (1u << format.mantissa_bits) - 1) {
    value = NAN;
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - bias - format.mantissa_bits);
  } else {
    value = std::ldexp(mantissa + (1u << format.mantissa_bits), exponent - bias - format.mantissa_bits);
  }
  return negative ? -value : value;
}

inline float from_half(uint16_t x) { return static_cast<float>(std::bit_cast<_Float16>(x)); }
inline float from_bfloat(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }
inline uint16_t to_half(float x) { return std::isnan(x) ? 0x7fff : std::bit_cast<uint16_t>(static_cast<_Float16>(x)); }
inline uint16_t to_bfloat(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// x + y in double, rounded to odd.
inline double odd_sum(double x, double y) {
  const double sum = x + y;
  if (!std::isfinite(sum)) return sum;
  const double back = sum - x, error = (x - (sum - back)) + (y - back);
  if (error == 0 || std::bit_cast<uint64_t>(sum) & 1) return sum;
  const bool away = (error > 0) == (sum > 0);
  return std::bit_cast<double>(std::bit_cast<uint64_t>(sum) + (away ? 1 : -1));
}

template <class T>
inline T flush(T x) {  // .ftz of float
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(T{0}, x) : x;
}
inline float flush(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return bits & 0x7f800000 ? x : std::bit_cast<float>(bits & 0x80000000);
}

// Directed rounding of what the block does.
class RoundingMode {
 public:
  explicit RoundingMode(Round round) : before_(std::fegetround()) {
    constexpr int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD, FE_TONEAREST};
    std::fesetround(modes[static_cast<int>(round)]);
  }
  ~RoundingMode() { std::fesetround(before_); }

 private:
  int before_;
};

}  // namespace emulator
