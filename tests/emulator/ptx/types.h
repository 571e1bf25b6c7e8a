// The types that PTX instructions name, and how wide each is.
#pragma once

#include <cstdint>
#include <string_view>

namespace emulator {

enum class Type : uint8_t {
  none,
  pred,
  b8,
  b16,
  b32,
  b64,
  b128,
  u8,
  u16,
  u32,
  u64,
  s8,
  s16,
  s32,
  s64,
  f16,
  f16x2,
  bf16,
  bf16x2,
  tf32,
  f32,
  f64,
  u16x2,
  s16x2,
  f32x2,
  e4m3x2,
  e5m2x2,
};

constexpr int kTypes = 27;

struct TypeFacts {
  std::string_view name;
  int bytes;    // of one lane's value; a predicate has 0: its 32 lanes are one word
  char family;  // p predicate, b bits, u, s, f IEEE float and double, h 16-bit float, x packed or narrower
};

constexpr TypeFacts kTypeFacts[kTypes] = {
    {"none", 0, '-'},   {"pred", 0, 'p'},   {"b8", 1, 'b'},     {"b16", 2, 'b'}, {"b32", 4, 'b'},   {"b64", 8, 'b'},
    {"b128", 16, 'b'},  {"u8", 1, 'u'},     {"u16", 2, 'u'},    {"u32", 4, 'u'}, {"u64", 8, 'u'},   {"s8", 1, 's'},
    {"s16", 2, 's'},    {"s32", 4, 's'},    {"s64", 8, 's'},    {"f16", 2, 'h'}, {"f16x2", 4, 'x'}, {"bf16", 2, 'h'},
    {"bf16x2", 4, 'x'}, {"tf32", 4, 'x'},   {"f32", 4, 'f'},    {"f64", 8, 'f'}, {"u16x2", 4, 'x'}, {"s16x2", 4, 'x'},
    {"f32x2", 8, 'x'},  {"e4m3x2", 2, 'x'}, {"e5m2x2", 2, 'x'},
};

constexpr const TypeFacts& facts(Type type) { return kTypeFacts[static_cast<int>(type)]; }
constexpr int bytes_of(Type type) { return facts(type).bytes; }
constexpr bool is_signed(Type type) { return facts(type).family == 's'; }
constexpr bool is_integer(Type type) { return is_signed(type) || facts(type).family == 'u'; }

constexpr Type type_named(std::string_view name) {
  for (int i = 1; i < kTypes; ++i)
    if (kTypeFacts[i].name == name) return static_cast<Type>(i);
  return Type::none;
}

}  // namespace emulator
