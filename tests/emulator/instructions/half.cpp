// Arithmetic of 16-bit floats, single and in pairs, and of pairs of 16-bit integers.
//
// Numbers are widened to double, where sums and fused products are rounded to odd; see rounding.h.
#include "families.h"
#include "lanes.h"
#include "rounding.h"

namespace emulator {

namespace {

enum Form { kFtz = 1, kSat = 2, kRelu = 4, kNan = 8, kXorsign = 16, kMin = 32, kThree = 64 };

template <bool kBf>
double widen(uint16_t x, int64_t form) {
  if (!kBf && form & kFtz && !(x & 0x7c00)) return x & 0x8000 ? -0.0 : 0.0;
  return kBf ? from_bfloat(x) : from_half(x);
}
template <bool kBf>
uint16_t narrow(double x, int64_t form) {
  if (form & kSat) x = x > 0 ? std::min(x, 1.0) : 0;
  if (form & kRelu) x = x > 0 || std::isnan(x) ? x : 0;
  const auto code = static_cast<uint16_t>(encode(x, kBf ? kBfloat : kHalf, Round::nearest));
  return !kBf && form & kFtz && !(code & 0x7c00) ? code & 0x8000 : code;
}

template <class F, bool kBf>
void run(Warp& w, const Instruction& in) {
  const int count = static_cast<int>(in.value[1]);  // operands
  const int per_lane = static_cast<int>(in.value[2]);
  const int64_t form = in.value[0];
  uint16_t* d = w.out<uint16_t>(in.d);
  const uint16_t* a = w.in<uint16_t>(in.a);
  const uint16_t* b = count > 1 ? w.in<uint16_t>(in.b) : a;
  const uint16_t* c = count > 2 ? w.in<uint16_t>(in.c) : a;
  each_lane(w.mask, [&](int lane) {
    for (int i = lane * per_lane; i < (lane + 1) * per_lane; ++i)
      d[i] = narrow<kBf>(F{}(widen<kBf>(a[i], form), widen<kBf>(b[i], form), widen<kBf>(c[i], form), form), form);
  });
}

template <class F>
void half(Decoder& s, int operands, F) {
  s.take("rn");
  s.take("approx");
  const bool ftz = s.take("ftz"), sat = s.take("sat"), relu = s.take("relu"), nan = s.take("NaN"),
             xorsign = s.take("xorsign");
  if (xorsign) s.need("abs");
  const Type t = s.type();
  const bool bf = t == Type::bf16 || t == Type::bf16x2;
  if (!bf && t != Type::f16 && t != Type::f16x2) s.unknown("unknown type");
  s.in.value[0] =
      ftz * kFtz | sat * kSat | relu * kRelu | nan * kNan | xorsign * kXorsign | (s.opcode() == "min") * kMin;
  s.in.value[1] = operands;
  s.in.value[2] = bytes_of(t) / 2;
  s.in.d = s.out(0, t);
  s.in.a = s.source(1, t);
  if (operands > 1) s.in.b = s.source(2, t);
  if (operands > 2) s.in.c = s.source(3, t);
  s.in.execute = bf ? run<F, true> : run<F, false>;
}

double choose(double a, double b, int64_t form) {
  const bool negative = std::signbit(a) != std::signbit(b);
  if (form & kXorsign) a = std::fabs(a), b = std::fabs(b);
  double found;
  if (std::isnan(a) || std::isnan(b)) {
    found = form & kNan ? NAN : std::isnan(a) ? b : a;
  } else if (a == b) {
    found = std::signbit(a) == static_cast<bool>(form & kMin) ? a : b;
  } else {
    found = (a < b) == static_cast<bool>(form & kMin) ? a : b;
  }
  return form & kXorsign ? (negative ? -std::fabs(found) : std::fabs(found)) : found;
}

// abs and neg touch the sign alone, of NaN too.
void sign(Decoder& s) {
  s.take("ftz");
  const Type t = s.type();
  const bool absolute = s.opcode() == "abs";
  if (bytes_of(t) == 2) {
    if (absolute) return unary<uint16_t, uint16_t>(s, t, t, [](uint16_t a) { return a & 0x7fff; });
    return unary<uint16_t, uint16_t>(s, t, t, [](uint16_t a) { return a ^ 0x8000; });
  }
  if (absolute) return unary<uint32_t, uint32_t>(s, t, t, [](uint32_t a) { return a & 0x7fff7fff; });
  unary<uint32_t, uint32_t>(s, t, t, [](uint32_t a) { return a ^ 0x80008000; });
}

template <class T, class F>
uint32_t both(uint32_t a, uint32_t b, F f) {
  const auto low = static_cast<uint16_t>(f(static_cast<T>(a), static_cast<T>(b)));
  const auto high = static_cast<uint16_t>(f(static_cast<T>(a >> 16), static_cast<T>(b >> 16)));
  return static_cast<uint32_t>(high) << 16 | low;
}

void integer_pair(Decoder& s, const std::string& op) {
  const Type t = s.type();
  using U = uint32_t;
  if (op == "add")
    return binary<U, U, U>(s, t, t, t,
                           [](U a, U b) { return both<uint16_t>(a, b, [](auto x, auto y) { return x + y; }); });
  const bool is_min = op == "min";
  if (t == Type::s16x2) {
    if (is_min)
      return binary<U, U, U>(
          s, t, t, t, [](U a, U b) { return both<int16_t>(a, b, [](auto x, auto y) { return std::min(x, y); }); });
    return binary<U, U, U>(s, t, t, t,
                           [](U a, U b) { return both<int16_t>(a, b, [](auto x, auto y) { return std::max(x, y); }); });
  }
  if (is_min)
    return binary<U, U, U>(
        s, t, t, t, [](U a, U b) { return both<uint16_t>(a, b, [](auto x, auto y) { return std::min(x, y); }); });
  binary<U, U, U>(s, t, t, t,
                  [](U a, U b) { return both<uint16_t>(a, b, [](auto x, auto y) { return std::max(x, y); }); });
}

// d = a op b on two floats at a time
template <class F>
void float_pair(Decoder& s, int operands, F) {
  s.take("rn");
  const bool ftz = s.take("ftz");
  const Type t = s.type();
  s.in.d = s.out(0, t);
  s.in.a = s.source(1, t);
  s.in.b = s.source(2, t);
  if (operands > 2) s.in.c = s.source(3, t);
  s.in.value[0] = ftz;
  s.in.value[1] = operands;
  s.in.execute = [](Warp& w, const Instruction& in) {
    float* d = w.out<float>(in.d);
    const float *a = w.in<float>(in.a), *b = w.in<float>(in.b), *c = in.value[1] > 2 ? w.in<float>(in.c) : a;
    each_lane(w.mask, [&](int lane) {
      for (int i = 2 * lane; i < 2 * lane + 2; ++i)
        d[i] = in.value[0] ? flush(F{}(flush(a[i]), flush(b[i]), flush(c[i]))) : F{}(a[i], b[i], c[i]);
    });
  };
}

}  // namespace

void half_instructions(Table& table) {
  auto sum = [](auto a, auto b, auto) { return a + b; };
  auto product = [](auto a, auto b, auto) { return a * b; };
  auto fused = [](auto a, auto b, auto c) { return std::fma(a, b, c); };
  table.add({"add"}, "hx", Class::half, [=](Decoder& s) {
    if (s.next_type() == Type::f32x2) return float_pair(s, 2, sum);
    if (s.next_type() == Type::u16x2 || s.next_type() == Type::s16x2) return integer_pair(s, "add");
    half(s, 2, [](double a, double b, double, int64_t) { return odd_sum(a, b); });
  });
  table.add({"sub"}, "hx", Class::half,
            [](Decoder& s) { half(s, 2, [](double a, double b, double, int64_t) { return odd_sum(a, -b); }); });
  table.add({"mul"}, "hx", Class::half, [=](Decoder& s) {
    if (s.next_type() == Type::f32x2) return float_pair(s, 2, product);
    half(s, 2, [](double a, double b, double, int64_t) { return a * b; });
  });
  table.add({"fma"}, "hx", Class::half, [=](Decoder& s) {
    if (s.next_type() == Type::f32x2) return float_pair(s, 3, fused);
    half(s, 3, [](double a, double b, double c, int64_t) { return odd_sum(a * b, c); });
  });
  table.add({"min", "max"}, "hx", Class::half, [](Decoder& s) {
    if (s.next_type() == Type::u16x2 || s.next_type() == Type::s16x2) return integer_pair(s, s.opcode());
    half(s, 2, [](double a, double b, double, int64_t form) { return choose(a, b, form); });
  });
  table.add({"ex2"}, "hx", Class::half,
            [](Decoder& s) { half(s, 1, [](double a, double, double, int64_t) { return std::exp2(a); }); });
  table.add({"tanh"}, "hx", Class::half,
            [](Decoder& s) { half(s, 1, [](double a, double, double, int64_t) { return std::tanh(a); }); });
  table.add({"abs", "neg"}, "hx", Class::half, sign);
}

}  // namespace emulator
