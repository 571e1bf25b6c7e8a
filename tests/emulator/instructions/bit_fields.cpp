// Bit fields: bfe bfi bfind brev clz popc fns szext bmsk.
#include "families.h"
#include "lanes.h"

namespace emulator {

namespace {

using U = uint32_t;
constexpr Type kWord = Type::b32;

void bfe(Decoder& s) {
  const Type t = s.type();
  with_integer(s, t, [&]<class T>() {
    ternary<T, T, U, U>(s, t, t, kWord, kWord, [](T a, U position, U length) -> T {
      const U p = position & 255, l = length & 255, bits = 8 * sizeof(T);
      const bool sign = std::is_signed_v<T> && l && (a >> std::min(p + l - 1, bits - 1) & 1);
      std::make_unsigned_t<T> found = p >= bits ? 0 : static_cast<std::make_unsigned_t<T>>(a) >> p;
      const U have = std::min(l, bits);
      if (have < bits) found &= (std::make_unsigned_t<T>{1} << have) - 1;
      if (sign) {
        const U known = p >= bits ? 0 : std::min(have, bits - p);
        if (known < bits) found |= ~std::make_unsigned_t<T>{0} << known;
      }
      return static_cast<T>(found);
    });
  });
}

void bfi(Decoder& s) {  // puts the low bits of a into b
  const Type t = s.type();
  s.in.d = s.out(0, t);
  s.in.a = s.source(1, t);
  s.in.b = s.source(2, t);
  s.in.c = s.source(3, kWord);
  s.in.e = s.source(4, kWord);
  with_integer(s, t, [&]<class T>() {
    s.in.execute = [](Warp& w, const Instruction& in) {
      T* d = w.out<T>(in.d);
      const T *a = w.in<T>(in.a), *b = w.in<T>(in.b);
      const U *position = w.in<U>(in.c), *length = w.in<U>(in.e);
      each_lane(w.mask, [&](int i) {
        const U p = position[i] & 255, l = length[i] & 255, bits = 8 * sizeof(T);
        const uint64_t field = (l >= 64 ? ~0ull : (1ull << l) - 1);
        const T mask = static_cast<T>(p >= bits ? 0 : field << p);
        d[i] = static_cast<T>((b[i] & ~mask) | ((p >= bits ? 0 : a[i] << p) & mask));
      });
    };
  });
}

void count_bits(Decoder& s) {
  const Type t = s.type();
  const std::string& op = s.opcode();
  if (op == "brev") {
    return with_integer(s, t, [&]<class T>() {
      unary<T, T>(s, t, t, [](T a) {
        T d = 0;
        for (unsigned i = 0; i < 8 * sizeof(T); ++i) d |= (a >> i & 1) << (8 * sizeof(T) - 1 - i);
        return d;
      });
    });
  }
  with_integer(s, t, [&]<class T>() {
    if constexpr (sizeof(T) >= 4) {
      constexpr int bits = 8 * sizeof(T);
      if (op == "popc")
        return unary<U, T>(s, kWord, t,
                           [](T a) { return __builtin_popcountll(static_cast<std::make_unsigned_t<T>>(a)); });
      return unary<U, T>(s, kWord, t, [](T a) {
        return a ? __builtin_clzll(static_cast<std::make_unsigned_t<T>>(a)) - (64 - bits) : bits;
      });
    }
    s.unknown("32 or 64 bits expected");
  });
}

void bfind(Decoder& s) {
  const bool amount = s.take("shiftamt");
  const Type t = s.type();
  with_integer(s, t, [&]<class T>() {
    constexpr int bits = 8 * sizeof(T);
    auto highest = [](T a) -> U {
      const auto x = static_cast<std::make_unsigned_t<T>>(a < 0 ? ~a : a);
      return x ? 63 - __builtin_clzll(x) : ~0u;
    };
    if (amount)
      return unary<U, T>(s, kWord, t, [](T a) {
        const U h = decltype(highest){}(a);
        return h == ~0u ? h : bits - 1 - h;
      });
    unary<U, T>(s, kWord, t, highest);
  });
}

// bmsk: a mask of b ones from bit a upwards
template <bool kClamp>
U bit_mask(U a, U b) {
  if (kClamp) return a >= 32 ? 0 : (b >= 32 ? ~0u : (1u << b) - 1) << a;
  return ((1u << (b & 31)) - 1) << (a & 31);
}

void bmsk(Decoder& s) {
  const bool clamp = s.take("clamp");
  if (!clamp) s.need("wrap");
  s.need("b32");
  if (clamp) return binary<U, U, U>(s, kWord, kWord, kWord, [](U a, U b) { return bit_mask<true>(a, b); });
  binary<U, U, U>(s, kWord, kWord, kWord, [](U a, U b) { return bit_mask<false>(a, b); });
}

// szext: the low b bits of a, extended
void szext(Decoder& s) {
  const bool clamp = s.take("clamp");
  if (!clamp) s.need("wrap");
  const Type t = s.type();
  s.in.value[0] = clamp;
  s.in.value[1] = t == Type::s32;
  s.in.d = s.out(0, t);
  s.in.a = s.source(1, t);
  s.in.b = s.source(2, kWord);
  s.in.execute = [](Warp& w, const Instruction& in) {
    each_lane(w.mask, [&](int i) {
      const U a = w.in<U>(in.a)[i], given = w.in<U>(in.b)[i], bits = in.value[0] ? std::min(given, 32u) : given & 31;
      const U low = bits == 0 ? 0 : a << (32 - bits);
      w.out<U>(in.d)[i] = bits == 0     ? 0
                          : in.value[1] ? static_cast<U>(static_cast<int32_t>(low) >> (32 - bits))
                                        : low >> (32 - bits);
    });
  };
}

// fns: the position of the c-th set bit of a from bit b, upwards or downwards; all ones if there is none
U find_nth(U a, U b, int32_t offset) {
  if (offset == 0) return a >> (b & 31) & 1 ? b : ~0u;
  int left = std::abs(offset);
  for (int32_t at = static_cast<int32_t>(b); at >= 0 && at < 32; at += offset > 0 ? 1 : -1)
    if (a >> at & 1 && --left == 0) return static_cast<U>(at);
  return ~0u;
}

}  // namespace

void bit_field_instructions(Table& table) {
  table.add({"bfe"}, "us", Class::integer, bfe);
  table.add({"bfi"}, "b", Class::integer, bfi);
  table.add({"popc", "clz", "brev"}, "b", Class::integer, count_bits);
  table.add({"bfind"}, "us", Class::integer, bfind);
  table.add({"bmsk"}, "b", Class::integer, bmsk);
  table.add({"szext"}, "us", Class::integer, szext);
  table.add({"fns"}, "b", Class::integer, [](Decoder& s) {
    s.need("b32");
    ternary<U, U, U, int32_t>(s, kWord, kWord, kWord, Type::s32, [](U a, U b, int32_t c) { return find_nth(a, b, c); });
  });
}

}  // namespace emulator
