// See reductions.h.
#include "reductions.h"

#include <cstring>

#include "rounding.h"

namespace emulator {

namespace {

template <class T>
T apply(int operation, T old, T b, T c) {
  switch (operation) {
    case kAdd:
      if constexpr (std::is_integral_v<T>)
        return static_cast<T>(static_cast<std::make_unsigned_t<T>>(old) + static_cast<std::make_unsigned_t<T>>(b));
      return old + b;
    case kMin:
      return old < b ? old : b;
    case kMax:
      return old > b ? old : b;
    case kExch:
      return b;
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (operation) {
      case kAnd:
        return old & b;
      case kOr:
        return old | b;
      case kXor:
        return old ^ b;
      case kCas:
        return old == b ? c : old;
      case kInc:
        return old >= b ? 0 : old + 1;
      case kDec:
        return old == 0 || old > b ? b : old - 1;
      default:
        break;
    }
  }
  return old;
}

template <class T>
void apply_at(int operation, uint8_t* at, const uint8_t* b, const uint8_t* c) {
  T old, x, y{};
  std::memcpy(&old, at, sizeof(T));
  std::memcpy(&x, b, sizeof(T));
  if (c) std::memcpy(&y, c, sizeof(T));
  old = apply(operation, old, x, y);
  std::memcpy(at, &old, sizeof(T));
}

template <bool kBf, int kCount>
void apply_half_at(int operation, uint8_t* at, const uint8_t* b, const uint8_t*) {
  constexpr Format format = kBf ? kBfloat : kHalf;
  for (int i = 0; i < kCount; ++i) {
    uint16_t old, add;
    std::memcpy(&old, at + 2 * i, 2);
    std::memcpy(&add, b + 2 * i, 2);
    const double x = decode_number(old, format), y = decode_number(add, format);
    const double value = operation == kAdd ? odd_sum(x, y) : operation == kMin ? std::fmin(x, y) : std::fmax(x, y);
    old = static_cast<uint16_t>(encode(value, format, Round::nearest));
    std::memcpy(at + 2 * i, &old, 2);
  }
}

void exchange_wide(int operation, uint8_t* at, const uint8_t* b, const uint8_t* c) {  // 128 bits: exch and cas
  if (operation == kExch)
    std::memcpy(at, b, 16);
  else if (std::memcmp(at, b, 16) == 0)
    std::memcpy(at, c, 16);
}

bool is_half(Type t) { return t == Type::f16 || t == Type::bf16 || t == Type::f16x2 || t == Type::bf16x2; }

}  // namespace

Reduce reduce_of(Type type) {
  switch (type) {
    case Type::b16:
      return apply_at<uint16_t>;
    case Type::b32:
    case Type::u32:
      return apply_at<uint32_t>;
    case Type::s32:
      return apply_at<int32_t>;
    case Type::b64:
    case Type::u64:
      return apply_at<uint64_t>;
    case Type::s64:
      return apply_at<int64_t>;
    case Type::f32:
      return apply_at<float>;
    case Type::f64:
      return apply_at<double>;
    case Type::f16:
      return apply_half_at<false, 1>;
    case Type::f16x2:
      return apply_half_at<false, 2>;
    case Type::bf16:
      return apply_half_at<true, 1>;
    case Type::bf16x2:
      return apply_half_at<true, 2>;
    case Type::b128:
      return exchange_wide;
    default:
      return nullptr;
  }
}

int take_reduction(Decoder& s) {
  for (int k = kAdd; k <= kCas; ++k)
    if (s.take(kReductionNames[k])) return k;
  s.unknown("unknown operation");
}

// The combinations that ptxas accepts.
bool has_reduction(int operation, Type t) {
  const bool word = t == Type::u32 || t == Type::s32, wide = t == Type::u64;
  switch (operation) {
    case kAdd:
      return word || wide || t == Type::f32 || t == Type::f64 || is_half(t);
    case kMin:
    case kMax:
      return word || wide || t == Type::s64;
    case kInc:
    case kDec:
      return t == Type::u32;
    case kExch:
      return t == Type::b32 || t == Type::b64 || t == Type::b128;
    case kCas:
      return t == Type::b16 || t == Type::b32 || t == Type::b64 || t == Type::b128;
    default:
      return t == Type::b32 || t == Type::b64;
  }
}

bool has_wide_reduction(int operation, Type t) {
  return operation <= kDec && (has_reduction(operation, t) || (is_half(t) && (operation == kMin || operation == kMax)));
}

}  // namespace emulator
