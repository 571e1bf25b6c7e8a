// Logic, shifts and permutations of bytes: and or xor not cnot lop3 shl shr shf prmt. Bit fields are in bit_fields.cpp.
#include "families.h"
#include "lanes.h"

namespace emulator {

namespace {

using U = uint32_t;
constexpr Type kWord = Type::b32;

void logic(Decoder& s) {
  const Type t = s.type();
  const std::string& op = s.opcode();
  if (t == Type::pred) {
    s.in.d = s.out(0, t);
    s.in.a = s.source(1, t);
    if (op == "not") {
      s.in.execute = [](Warp& w, const Instruction& in) { w.set_predicate(in.d, ~w.predicate(in.a)); };
      return;
    }
    s.in.b = s.source(2, t);
    if (op == "and")
      s.in.execute = [](Warp& w, const Instruction& in) {
        w.set_predicate(in.d, w.predicate(in.a) & w.predicate(in.b));
      };
    else if (op == "or")
      s.in.execute = [](Warp& w, const Instruction& in) {
        w.set_predicate(in.d, w.predicate(in.a) | w.predicate(in.b));
      };
    else
      s.in.execute = [](Warp& w, const Instruction& in) {
        w.set_predicate(in.d, w.predicate(in.a) ^ w.predicate(in.b));
      };
    return;
  }
  with_integer(s, t, [&]<class T>() {
    if (op == "and") return binary<T, T, T>(s, t, t, t, [](T a, T b) { return a & b; });
    if (op == "or") return binary<T, T, T>(s, t, t, t, [](T a, T b) { return a | b; });
    if (op == "xor") return binary<T, T, T>(s, t, t, t, [](T a, T b) { return a ^ b; });
    if (op == "not") return unary<T, T>(s, t, t, [](T a) { return ~a; });
    unary<T, T>(s, t, t, [](T a) { return a == 0 ? 1 : 0; });  // cnot
  });
}

// Shift counts above the width clamp to it.
void shift(Decoder& s) {
  const Type t = s.type();
  with_integer(s, t, [&]<class T>() {
    constexpr uint32_t bits = 8 * sizeof(T);
    if (s.opcode() == "shl")
      return binary<T, T, U>(s, t, t, kWord, [](T a, U n) {
        return static_cast<T>(n >= bits ? 0 : static_cast<std::make_unsigned_t<T>>(a) << n);
      });
    binary<T, T, U>(s, t, t, kWord, [](T a, U n) { return static_cast<T>(n >= bits ? (a < 0 ? -1 : 0) : a >> n); });
  });
}

void funnel(Decoder& s) {  // d = the low (r) or high (l) word of {b, a} shifted
  const std::string way = s.take_one({"l", "r"}), mode = s.take_one({"wrap", "clamp"});
  s.need("b32");
  if (way.empty() || mode.empty()) s.unknown("unknown form of shf");
  if (way == "l" && mode == "wrap")
    return ternary<U, U, U, U>(s, kWord, kWord, kWord, kWord, [](U a, U b, U n) {
      return static_cast<U>(((uint64_t{b} << 32 | a) << (n & 31)) >> 32);
    });
  if (way == "l")
    return ternary<U, U, U, U>(s, kWord, kWord, kWord, kWord, [](U a, U b, U n) {
      return static_cast<U>(n >= 32 ? a : ((uint64_t{b} << 32 | a) << n) >> 32);
    });
  if (mode == "wrap")
    return ternary<U, U, U, U>(s, kWord, kWord, kWord, kWord,
                               [](U a, U b, U n) { return static_cast<U>((uint64_t{b} << 32 | a) >> (n & 31)); });
  ternary<U, U, U, U>(s, kWord, kWord, kWord, kWord,
                      [](U a, U b, U n) { return static_cast<U>((uint64_t{b} << 32 | a) >> (n > 32 ? 32 : n)); });
}

void lop3(Decoder& s) {  // bit a*4+b*2+c of the table for each bit
  s.need("b32");
  s.in.value[0] = s.immediate(4);
  s.in.d = s.out(0, kWord);
  s.in.a = s.source(1, kWord);
  s.in.b = s.source(2, kWord);
  s.in.c = s.source(3, kWord);
  s.in.execute = [](Warp& w, const Instruction& in) {
    U keep[8];
    for (int k = 0; k < 8; ++k) keep[k] = in.value[0] >> k & 1 ? ~0u : 0;
    U* d = w.out<U>(in.d);
    const U *a = w.in<U>(in.a), *b = w.in<U>(in.b), *c = w.in<U>(in.c);
    each_lane(w.mask, [&](int i) {
      const U x = a[i], y = b[i], z = c[i];
      d[i] = (keep[0] & ~x & ~y & ~z) | (keep[1] & ~x & ~y & z) | (keep[2] & ~x & y & ~z) | (keep[3] & ~x & y & z) |
             (keep[4] & x & ~y & ~z) | (keep[5] & x & ~y & z) | (keep[6] & x & y & ~z) | (keep[7] & x & y & z);
    });
  };
}

U permute(U a, U b, U selector) {
  const uint64_t both = uint64_t{b} << 32 | a;
  U d = 0;
  for (int i = 0; i < 4; ++i) {
    const U pick = selector >> 4 * i & 15;
    U byte = both >> 8 * (pick & 7) & 255;
    if (pick & 8) byte = byte & 128 ? 255 : 0;  // the sign spread over the byte
    d |= byte << 8 * i;
  }
  return d;
}

void prmt(Decoder& s) {
  s.need("b32");
  const std::string mode = s.take_one({"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"});
  if (mode.empty())
    return ternary<U, U, U, U>(s, kWord, kWord, kWord, kWord,
                               [](U a, U b, U selector) { return permute(a, b, selector); });
  // The modes make a selector from the low two bits of c.
  if (mode == "f4e")
    return ternary<U, U, U, U>(s, kWord, kWord, kWord, kWord,
                               [](U a, U b, U c) { return static_cast<U>((uint64_t{b} << 32 | a) >> 8 * (c & 3)); });
  if (mode == "b4e")
    return ternary<U, U, U, U>(s, kWord, kWord, kWord, kWord, [](U a, U b, U c) {
      c &= 3;
      return permute(a, b, ((c - 3) & 7) << 12 | ((c - 2) & 7) << 8 | ((c - 1) & 7) << 4 | c);
    });
  if (mode == "rc8")
    return ternary<U, U, U, U>(s, kWord, kWord, kWord, kWord,
                               [](U a, U b, U c) { return permute(a, b, (c & 3) * 0x1111); });
  if (mode == "rc16")
    return ternary<U, U, U, U>(s, kWord, kWord, kWord, kWord,
                               [](U a, U b, U c) { return permute(a, b, c & 1 ? 0x3232 : 0x1010); });
  if (mode == "ecl")
    return ternary<U, U, U, U>(s, kWord, kWord, kWord, kWord, [](U a, U b, U c) {
      c &= 3;
      return permute(a, b, 3u << 12 | std::max(c, 2u) << 8 | std::max(c, 1u) << 4 | c);
    });
  ternary<U, U, U, U>(s, kWord, kWord, kWord, kWord, [](U a, U b, U c) {
    c &= 3;
    return permute(a, b, c << 12 | std::min(c, 2u) << 8 | std::min(c, 1u) << 4);
  });
}

}  // namespace

void bit_instructions(Table& table) {
  table.add({"and", "or", "xor", "not", "cnot"}, "bp", Class::integer, logic);
  table.add({"shl", "shr"}, "busx", Class::integer, shift);
  table.add({"shf"}, "b", Class::integer, funnel);
  table.add({"lop3"}, "b", Class::integer, lop3);
  table.add({"prmt"}, "b", Class::integer, prmt);
}

}  // namespace emulator
