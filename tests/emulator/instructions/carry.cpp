// Integer arithmetic of more than one word: add.cc addc sub.cc subc mad.cc madc, with a carry of one bit per lane.
//
// A difference is a + ~b + 1, and its carry is that of this sum, 1 where nothing was borrowed: so the hardware has it,
// and nvcc's 128-bit division reads it with addc.
#include "carry.h"

#include "lanes.h"

namespace emulator {

namespace {

enum Kind { kSum, kDifference, kLowProduct, kHighProduct };

// value: [0] Kind, [1] takes the carry, [2] leaves one
template <class T>
void run(Warp& w, const Instruction& in) {
  using W = unsigned __int128;
  constexpr int bits = 8 * sizeof(T);
  using U = std::make_unsigned_t<T>;
  const U mask = ~U{0};
  uint32_t left = 0;
  each_lane(w.mask, [&](int i) {
    const W carry = in.value[1] ? w.carry >> i & 1 : in.value[0] == kDifference;
    const T a = w.in<T>(in.a)[i], b = w.in<T>(in.b)[i];
    W result;
    if (in.value[0] == kDifference) {
      result = W{static_cast<U>(a)} + static_cast<U>(~static_cast<U>(b)) + carry;
    } else if (in.value[0] == kSum) {
      result = W{static_cast<U>(a)} + static_cast<U>(b) + carry;
    } else {
      const __int128 product = static_cast<__int128>(a) * b;  // exact, or the right bits of an unsigned one
      const auto half = static_cast<U>(static_cast<W>(product) >> (in.value[0] == kHighProduct ? bits : 0));
      result = W{half} + static_cast<U>(w.in<T>(in.c)[i]) + carry;
    }
    w.out<U>(in.d)[i] = static_cast<U>(result & mask);
    left |= static_cast<uint32_t>(result >> bits & 1) << i;
  });
  if (in.value[2]) w.carry = (w.carry & ~w.mask) | left;
}

}  // namespace

void carry(Decoder& s) {
  const std::string& name = s.opcode();
  s.in.value[1] = name.back() == 'c';
  s.in.value[2] = s.take("cc");
  s.in.value[0] = name[0] == 'a' ? kSum : name[0] == 's' ? kDifference : s.take("hi") ? kHighProduct : kLowProduct;
  const bool product = s.in.value[0] >= kLowProduct;
  if (s.in.value[0] == kLowProduct) s.need("lo");
  const Type t = s.type();
  s.in.d = s.out(0, t);
  s.in.a = s.source(1, t);
  s.in.b = s.source(2, t);
  if (product) s.in.c = s.source(3, t);
  with_integer(s, t, [&]<class T>() {
    if (sizeof(T) < 4) s.unknown("32 or 64 bits expected");
    s.in.execute = run<T>;
  });
}

}  // namespace emulator
