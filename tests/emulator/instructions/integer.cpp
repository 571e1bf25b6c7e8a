// Integer arithmetic: add sub mul mad div rem abs neg min max sad, and of packed bytes: dot
// products and differences. With a carry: carry.cpp.
#include "carry.h"
#include "families.h"
#include "lanes.h"

namespace emulator {

namespace {

template <class T>
using Unsigned = std::make_unsigned_t<T>;

template <class T>
T saturate(int64_t value) {
  return static_cast<T>(value > std::numeric_limits<T>::max()   ? std::numeric_limits<T>::max()
                        : value < std::numeric_limits<T>::min() ? std::numeric_limits<T>::min()
                                                                : value);
}

void add_sub(Decoder& s) {
  if (s.has("cc")) return carry(s);
  const bool sat = s.take("sat");
  const Type t = s.type();
  with_integer(s, t, [&]<class T>() {
    using U = Unsigned<T>;
    if (sat) {
      if (t != Type::s32) s.unknown(".sat is of .s32");
      if (s.opcode() == "add")
        return binary<T, T, T>(s, t, t, t, [](T a, T b) {
          return saturate<int32_t>(int64_t{static_cast<int32_t>(a)} + static_cast<int32_t>(b));
        });
      return binary<T, T, T>(s, t, t, t, [](T a, T b) {
        return saturate<int32_t>(int64_t{static_cast<int32_t>(a)} - static_cast<int32_t>(b));
      });
    }
    if (s.opcode() == "add") return binary<U, U, U>(s, t, t, t, [](U a, U b) { return a + b; });
    return binary<U, U, U>(s, t, t, t, [](U a, U b) { return a - b; });
  });
}

void mul_mad(Decoder& s) {
  if (s.has("cc")) return carry(s);
  const std::string part = s.take_one({"lo", "hi", "wide"});
  const bool sat = s.take("sat");
  const Type t = s.type();
  const bool mad = s.opcode() == "mad";
  if (part.empty() || sat) s.unknown("unknown form of mul");
  with_integer(s, t, [&]<class T>() {
    using U = Unsigned<T>;
    using W = typename Wider<T>::type;
    if (part == "lo") {
      if (mad)
        return ternary<U, U, U, U>(s, t, t, t, t, [](U a, U b, U c) { return static_cast<U>(uint64_t{a} * b + c); });
      return binary<U, U, U>(s, t, t, t, [](U a, U b) { return static_cast<U>(uint64_t{a} * b); });
    }
    if (part == "hi") {
      if (mad)
        return ternary<T, T, T, T>(s, t, t, t, t, [](T a, T b, T c) {
          return static_cast<T>(static_cast<U>(static_cast<W>(a) * b >> (8 * sizeof(T))) + static_cast<U>(c));
        });
      return binary<T, T, T>(s, t, t, t,
                             [](T a, T b) { return static_cast<T>(static_cast<W>(a) * b >> (8 * sizeof(T))); });
    }
    const Type w = wider(t);
    if constexpr (sizeof(T) == 2 || sizeof(T) == 4) {
      if (mad) {
        using V = Unsigned<W>;
        return ternary<W, T, T, W>(s, w, t, t, w, [](T a, T b, W c) {
          return static_cast<W>(static_cast<V>(static_cast<W>(a) * b) + static_cast<V>(c));
        });
      }
      return binary<W, T, T>(s, w, t, t, [](T a, T b) { return static_cast<W>(a) * b; });
    }
    s.unknown(".wide of this type");
  });
}

void mul24(Decoder& s) {
  s.need("lo");
  const Type t = s.type();
  if (t == Type::u32)
    return binary<uint32_t, uint32_t, uint32_t>(s, t, t, t,
                                                [](uint32_t a, uint32_t b) { return (a & 0xffffff) * (b & 0xffffff); });
  binary<int32_t, int32_t, int32_t>(s, t, t, t, [](int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(int64_t{a << 8 >> 8} * (b << 8 >> 8)));
  });
}

// Division by zero gives all ones, the remainder the dividend, as the hardware does.
void div_rem(Decoder& s) {
  const Type t = s.type();
  with_integer(s, t, [&]<class T>() {
    if (s.opcode() == "div")
      return binary<T, T, T>(s, t, t, t, [](T a, T b) -> T {
        if (b == 0) return static_cast<T>(-1);
        if (std::is_signed_v<T> && b == static_cast<T>(-1)) return static_cast<T>(-static_cast<Unsigned<T>>(a));
        return static_cast<T>(a / b);
      });
    binary<T, T, T>(s, t, t, t, [](T a, T b) -> T {
      if (b == 0) return a;
      if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
      return static_cast<T>(a % b);
    });
  });
}

void min_max(Decoder& s) {
  const bool relu = s.take("relu");
  const Type t = s.type();
  with_integer(s, t, [&]<class T>() {
    if (relu) {
      if (s.opcode() == "min")
        return binary<T, T, T>(s, t, t, t, [](T a, T b) {
          const T m = a < b ? a : b;
          return m > 0 ? m : T{0};
        });
      return binary<T, T, T>(s, t, t, t, [](T a, T b) {
        const T m = a > b ? a : b;
        return m > 0 ? m : T{0};
      });
    }
    if (s.opcode() == "min") return binary<T, T, T>(s, t, t, t, [](T a, T b) { return a < b ? a : b; });
    binary<T, T, T>(s, t, t, t, [](T a, T b) { return a > b ? a : b; });
  });
}

void abs_neg(Decoder& s) {
  const Type t = s.type();
  with_integer(s, t, [&]<class T>() {
    using U = Unsigned<T>;
    if (s.opcode() == "abs")
      return unary<T, T>(s, t, t, [](T a) { return static_cast<T>(a < 0 ? -static_cast<U>(a) : static_cast<U>(a)); });
    unary<T, T>(s, t, t, [](T a) { return static_cast<T>(-static_cast<U>(a)); });
  });
}

void sad(Decoder& s) {
  const Type t = s.type();
  with_integer(s, t, [&]<class T>() {
    using U = Unsigned<T>;
    ternary<T, T, T, U>(s, t, t, t, t, [](T a, T b, U c) {
      return static_cast<T>(c +
                            (a < b ? static_cast<U>(b) - static_cast<U>(a) : static_cast<U>(a) - static_cast<U>(b)));
    });
  });
}

template <class A, class B>
uint32_t dot4(uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 32; i += 8)
    c += static_cast<uint32_t>(static_cast<int32_t>(static_cast<A>(a >> i)) *
                               static_cast<int32_t>(static_cast<B>(b >> i)));
  return c;
}

void dp4a(Decoder& s) {
  const bool a_signed = is_signed(s.type()), b_signed = is_signed(s.type());
  const Type t = Type::b32;
  using U = uint32_t;
  if (a_signed && b_signed)
    return ternary<U, U, U, U>(s, t, t, t, t, [](U a, U b, U c) { return dot4<int8_t, int8_t>(a, b, c); });
  if (a_signed) return ternary<U, U, U, U>(s, t, t, t, t, [](U a, U b, U c) { return dot4<int8_t, uint8_t>(a, b, c); });
  if (b_signed) return ternary<U, U, U, U>(s, t, t, t, t, [](U a, U b, U c) { return dot4<uint8_t, int8_t>(a, b, c); });
  ternary<U, U, U, U>(s, t, t, t, t, [](U a, U b, U c) { return dot4<uint8_t, uint8_t>(a, b, c); });
}

template <class A, class B, int kHigh>
uint32_t dot2(uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 2; ++i)
    c += static_cast<uint32_t>(static_cast<int32_t>(static_cast<A>(a >> 16 * i)) *
                               static_cast<int32_t>(static_cast<B>(b >> (16 * kHigh + 8 * i))));
  return c;
}

// vabsdiff2 and vabsdiff4: |a - b| of each part; with .add their sum and c, otherwise packed.
template <class T>
uint32_t packed_difference(uint32_t a, uint32_t b, uint32_t c, bool adds) {
  constexpr int bits = 8 * sizeof(T);
  uint32_t sum = c, packed = 0;
  for (int i = 0; i < 32; i += bits) {
    const int x = static_cast<T>(a >> i), y = static_cast<T>(b >> i);
    const auto difference = static_cast<uint32_t>(x < y ? y - x : x - y);
    sum += difference;
    packed |= (difference & ((1u << bits) - 1)) << i;
  }
  return adds ? sum : packed;
}

void vabsdiff(Decoder& s) {
  const bool adds = s.take("add");
  const Type d = s.type(), a = s.type(), b = s.type(), t = Type::b32;
  if (d != Type::u32 || a != b || (a != Type::u32 && a != Type::s32)) s.unknown("unknown types");
  using U = uint32_t;
  auto with = [&]<class T>() {
    if (adds)
      return ternary<U, U, U, U>(s, t, t, t, t, [](U x, U y, U z) { return packed_difference<T>(x, y, z, true); });
    ternary<U, U, U, U>(s, t, t, t, t, [](U x, U y, U z) { return packed_difference<T>(x, y, z, false); });
  };
  const bool four = s.opcode().back() == '4';
  if (a == Type::u32) return four ? with.operator()<uint8_t>() : with.operator()<uint16_t>();
  four ? with.operator()<int8_t>() : with.operator()<int16_t>();
}

void dp2a(Decoder& s) {
  const bool high = s.take("hi");
  if (!high) s.need("lo");
  const bool a_signed = is_signed(s.type()), b_signed = is_signed(s.type());
  const Type t = Type::b32;
  using U = uint32_t;
  auto with = [&]<class A, class B>() {
    if (high) return ternary<U, U, U, U>(s, t, t, t, t, [](U a, U b, U c) { return dot2<A, B, 1>(a, b, c); });
    ternary<U, U, U, U>(s, t, t, t, t, [](U a, U b, U c) { return dot2<A, B, 0>(a, b, c); });
  };
  if (a_signed && b_signed) return with.operator()<int16_t, int8_t>();
  if (a_signed) return with.operator()<int16_t, uint8_t>();
  if (b_signed) return with.operator()<uint16_t, int8_t>();
  with.operator()<uint16_t, uint8_t>();
}

}  // namespace

void integer_instructions(Table& table) {
  table.add({"add", "sub"}, "us", Class::integer, add_sub);
  table.add({"mul", "mad"}, "us", Class::integer, mul_mad);
  table.add({"addc", "subc", "madc"}, "us", Class::integer, carry);
  table.add({"mul24"}, "us", Class::integer, mul24);
  table.add({"div", "rem"}, "us", Class::integer, div_rem);
  table.add({"min", "max"}, "us", Class::integer, min_max);
  table.add({"abs", "neg"}, "us", Class::integer, abs_neg);
  table.add({"sad"}, "us", Class::integer, sad);
  table.add({"vabsdiff2", "vabsdiff4"}, "us", Class::integer, vabsdiff);
  table.add({"dp4a"}, "us", Class::integer, dp4a);
  table.add({"dp2a"}, "us", Class::integer, dp2a);
}

}  // namespace emulator
