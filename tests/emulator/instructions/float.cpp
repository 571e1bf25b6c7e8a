// float and double arithmetic: add sub mul fma mad div rcp sqrt min max abs neg copysign.
//
// Compiled with -frounding-math -ffp-contract=off: what is written is what is rounded.
#include "families.h"
#include "lanes.h"
#include "rounding.h"

namespace emulator {

namespace {

template <class T, bool kFtz>
T pre(T x) {
  if constexpr (kFtz) return flush(x);
  return x;
}
template <class T, bool kFtz, bool kSat>
T post(T x) {
  if constexpr (kFtz) x = flush(x);
  if constexpr (kSat) x = x > 0 ? (x < 1 ? x : T{1}) : T{0};  // NaN becomes 0
  return x;
}

template <class F, class T, bool kFtz, bool kSat, int kOperands>
void run(Warp& w, const Instruction& in) {
  T* d = w.out<T>(in.d);
  const T* a = w.in<T>(in.a);
  const T* b = kOperands > 1 ? w.in<T>(in.b) : a;
  const T* c = kOperands > 2 ? w.in<T>(in.c) : a;
  auto all = [&] {
    each_lane(w.mask, [&](int i) {
      if constexpr (kOperands == 1) d[i] = post<T, kFtz, kSat>(F{}(pre<T, kFtz>(a[i])));
      if constexpr (kOperands == 2) d[i] = post<T, kFtz, kSat>(F{}(pre<T, kFtz>(a[i]), pre<T, kFtz>(b[i])));
      if constexpr (kOperands == 3)
        d[i] = post<T, kFtz, kSat>(F{}(pre<T, kFtz>(a[i]), pre<T, kFtz>(b[i]), pre<T, kFtz>(c[i])));
    });
  };
  if (in.value[0] == 0) return all();
  RoundingMode directed(static_cast<Round>(in.value[0]));
  all();
}

// .rounding .ftz .sat .type d, a [, b [, c]]
template <int kOperands, class F>
void rounded(Decoder& s, F) {
  s.in.value[0] = static_cast<int64_t>(round_named(s.take_one({"rn", "rz", "rm", "rp"})));
  const bool ftz = s.take("ftz"), sat = s.take("sat");
  s.take("approx");
  s.take("full");
  const Type t = s.type();
  s.in.d = s.out(0, t);
  s.in.a = s.source(1, t);
  if (kOperands > 1) s.in.b = s.source(2, t);
  if (kOperands > 2) s.in.c = s.source(3, t);
  if (t == Type::f64) {
    if (sat) s.unknown("unknown form");
    s.in.execute = run<F, double, false, false, kOperands>;
    return;
  }
  if (t != Type::f32) s.unknown("unknown type");
  s.in.execute = ftz ? (sat ? run<F, float, true, true, kOperands> : run<F, float, true, false, kOperands>)
                     : (sat ? run<F, float, false, true, kOperands> : run<F, float, false, false, kOperands>);
}

template <class T>
T minimum(T a, T b) {
  return std::isnan(a) ? b : std::isnan(b) ? a : a == b ? (std::signbit(a) ? a : b) : a < b ? a : b;
}
template <class T>
T maximum(T a, T b) {
  return std::isnan(a) ? b : std::isnan(b) ? a : a == b ? (std::signbit(a) ? b : a) : a > b ? a : b;
}

template <class T>
void choose(Decoder& s, Type t, bool ftz, bool nan, bool xorsign, bool three) {
  const bool is_min = s.opcode() == "min";
  s.in.value[0] = ftz | nan << 1 | xorsign << 2 | is_min << 3 | three << 4;
  s.in.d = s.out(0, t);
  s.in.a = s.source(1, t);
  s.in.b = s.source(2, t);
  if (three) s.in.c = s.source(3, t);
  s.in.execute = [](Warp& w, const Instruction& in) {
    const int64_t form = in.value[0];
    T* d = w.out<T>(in.d);
    const T *a = w.in<T>(in.a), *b = w.in<T>(in.b), *c = form & 16 ? w.in<T>(in.c) : nullptr;
    each_lane(w.mask, [&](int i) {
      T x = a[i], y = b[i];
      if (form & 1) x = flush(x), y = flush(y);
      const bool negative = std::signbit(x) != std::signbit(y);
      if (form & 4) x = std::fabs(x), y = std::fabs(y);
      T found = form & 8 ? minimum(x, y) : maximum(x, y);
      bool spoiled = std::isnan(x) || std::isnan(y);
      if (c) {
        const T z = form & 1 ? flush(c[i]) : c[i];
        spoiled |= std::isnan(z);
        found = form & 8 ? minimum(found, z) : maximum(found, z);
      }
      if (form & 4) found = negative ? -std::fabs(found) : std::fabs(found);
      d[i] = form & 2 && spoiled ? std::numeric_limits<T>::quiet_NaN() : found;
    });
  };
}

void min_max(Decoder& s) {
  const bool ftz = s.take("ftz"), nan = s.take("NaN"), xorsign = s.take("xorsign");
  if (xorsign) s.need("abs");
  const Type t = s.type();
  if (t == Type::f32) return choose<float>(s, t, ftz, nan, xorsign, s.count() == 4);
  choose<double>(s, t, ftz, nan, xorsign, false);
}

void copysign(Decoder& s) {  // the sign of a on b
  const Type t = s.type();
  if (t == Type::f32)
    return binary<float, float, float>(s, t, t, t, [](float a, float b) { return std::copysign(b, a); });
  binary<double, double, double>(s, t, t, t, [](double a, double b) { return std::copysign(b, a); });
}

}  // namespace

void float_instructions(Table& table) {
  auto add = [](auto a, auto b) { return a + b; };
  auto subtract = [](auto a, auto b) { return a - b; };
  auto multiply = [](auto a, auto b) { return a * b; };
  auto divide = [](auto a, auto b) { return a / b; };
  auto fused = [](auto a, auto b, auto c) { return std::fma(a, b, c); };
  auto root = [](auto a) { return std::sqrt(a); };
  auto reciprocal = [](auto a) { return 1 / a; };
  auto reciprocal_root = [](auto a) { return static_cast<decltype(a)>(1 / std::sqrt(static_cast<double>(a))); };
  auto absolute = [](auto a) { return std::fabs(a); };
  auto negated = [](auto a) { return -a; };
  table.add({"add"}, "f", Class::floating, [=](Decoder& s) { rounded<2>(s, add); });
  table.add({"sub"}, "f", Class::floating, [=](Decoder& s) { rounded<2>(s, subtract); });
  table.add({"mul"}, "f", Class::floating, [=](Decoder& s) { rounded<2>(s, multiply); });
  table.add({"div"}, "f", Class::floating, [=](Decoder& s) { rounded<2>(s, divide); });
  table.add({"fma", "mad"}, "f", Class::floating, [=](Decoder& s) { rounded<3>(s, fused); });
  table.add({"sqrt"}, "f", Class::floating, [=](Decoder& s) { rounded<1>(s, root); });
  table.add({"rcp"}, "f", Class::floating, [=](Decoder& s) { rounded<1>(s, reciprocal); });
  table.add({"rsqrt"}, "f", Class::floating, [=](Decoder& s) { rounded<1>(s, reciprocal_root); });
  table.add({"abs"}, "f", Class::floating, [=](Decoder& s) { rounded<1>(s, absolute); });
  table.add({"neg"}, "f", Class::floating, [=](Decoder& s) { rounded<1>(s, negated); });
  table.add({"min", "max"}, "f", Class::floating, min_max);
  table.add({"copysign"}, "f", Class::floating, copysign);
  // The approximations of the special function unit, at the precision of the host.
  auto power = [](auto a) { return std::exp2(a); };
  auto logarithm = [](auto a) { return std::log2(a); };
  auto sine = [](auto a) { return std::sin(a); };
  auto cosine = [](auto a) { return std::cos(a); };
  auto tangent = [](auto a) { return std::tanh(a); };
  table.add({"ex2"}, "f", Class::floating, [=](Decoder& s) { rounded<1>(s, power); });
  table.add({"lg2"}, "f", Class::floating, [=](Decoder& s) { rounded<1>(s, logarithm); });
  table.add({"sin"}, "f", Class::floating, [=](Decoder& s) { rounded<1>(s, sine); });
  table.add({"cos"}, "f", Class::floating, [=](Decoder& s) { rounded<1>(s, cosine); });
  table.add({"tanh"}, "f", Class::floating, [=](Decoder& s) { rounded<1>(s, tangent); });
}

}  // namespace emulator
