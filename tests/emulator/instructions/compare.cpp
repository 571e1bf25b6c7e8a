// Comparisons and choices: set setp selp slct testp.
#include "families.h"
#include "lanes.h"
#include "rounding.h"

namespace emulator {

namespace {

// The comparison of the manual by name, as which of less, equal, greater, unordered make it true.
int truth_of(Decoder& s) {
  struct Named {
    const char* name;
    int truth;
  };
  constexpr int L = 1, E = 2, G = 4, U = 8;
  constexpr Named names[] = {{"eq", E},          {"ne", L | G},      {"lt", L},      {"le", L | E},      {"gt", G},
                             {"ge", G | E},      {"lo", L},          {"ls", L | E},  {"hi", G},          {"hs", G | E},
                             {"equ", E | U},     {"neu", L | G | U}, {"ltu", L | U}, {"leu", L | E | U}, {"gtu", G | U},
                             {"geu", G | E | U}, {"num", L | E | G}, {"nan", U}};
  for (const Named& one : names)
    if (s.take(one.name)) return one.truth;
  s.unknown("unknown comparison");
}

template <class T>
uint32_t compare(const T* a, const T* b, int truth, int form) {
  uint32_t result = 0;
  for (int i = 0; i < 32; ++i) {
    T x = a[i], y = b[i];
    if constexpr (std::is_floating_point_v<T>)
      if (form) x = flush(x), y = flush(y);
    const bool less = x<y, equal = x == y, greater = x> y;
    const int is = less * 1 | equal * 2 | greater * 4 | (!less && !equal && !greater) * 8;
    result |= static_cast<uint32_t>((is & truth) != 0) << i;
  }
  return result;
}

// Whether pairs of halves compare: low halves of all lanes, then high halves.
void halves(Warp& w, const Instruction& in, uint32_t* low, uint32_t* high) {
  const bool bf = in.value[1] & 4, pair = in.value[1] & 8, ftz = in.value[1] & 1;
  float a[2][32], b[2][32];
  for (int i = 0; i < 32; ++i)
    for (int part = 0; part < (pair ? 2 : 1); ++part) {
      auto widen = [&](const Operand& o) {
        const uint16_t x = w.in<uint16_t>(o)[pair ? 2 * i + part : i];
        if (ftz && !bf && !(x & 0x7c00)) return 0.0f;
        return bf ? from_bfloat(x) : from_half(x);
      };
      a[part][i] = widen(in.a);
      b[part][i] = widen(in.b);
    }
  *low = compare(a[0], b[0], static_cast<int>(in.value[0]), 0);
  if (pair) *high = compare(a[1], b[1], static_cast<int>(in.value[0]), 0);
}

template <class T>
void results(Warp& w, const Instruction& in, uint32_t* low, uint32_t*) {
  *low = compare(w.in<T>(in.a), w.in<T>(in.b), static_cast<int>(in.value[0]), in.value[1] & 1);
}

using Compare = void (*)(Warp&, const Instruction&, uint32_t*, uint32_t*);

Compare compare_of(Decoder& s, Type t) {
  switch (t) {
    case Type::f32:
      return results<float>;
    case Type::f64:
      return results<double>;
    case Type::f16:
      return halves;
    case Type::bf16:
      s.in.value[1] |= 4;
      return halves;
    case Type::f16x2:
      s.in.value[1] |= 8;
      return halves;
    case Type::bf16x2:
      s.in.value[1] |= 12;
      return halves;
    default:
      break;
  }
  Compare found = nullptr;
  with_integer(s, t, [&]<class T>() { found = results<T>; });
  return found;
}

// setp.cmp[.bool] p[|q], a, b[, [!]c]: p = (a cmp b) bool c, q = !(a cmp b) bool c; pairs: q is the high half
void setp(Decoder& s) {
  s.in.value[0] = truth_of(s);
  s.in.value[2] = 0;
  if (s.take("and")) s.in.value[2] = 1;
  if (s.take("or")) s.in.value[2] = 2;
  if (s.take("xor")) s.in.value[2] = 3;
  s.in.value[1] = s.take("ftz");
  const Type t = s.type();
  s.in.value[3] = reinterpret_cast<int64_t>(compare_of(s, t));
  std::tie(s.in.d, s.in.d2) = s.out_pair(0, Type::pred, Type::pred);
  s.in.a = s.source(1, t);
  s.in.b = s.source(2, t);
  if (s.in.value[2]) s.in.c = s.source(3, Type::pred);
  s.in.execute = [](Warp& w, const Instruction& in) {
    uint32_t low, high;
    reinterpret_cast<Compare>(in.value[3])(w, in, &low, &high);
    if (!(in.value[1] & 8)) high = ~low;
    if (in.value[2]) {
      const uint32_t c = w.predicate(in.c);
      auto with = [&](uint32_t x) { return in.value[2] == 1 ? x & c : in.value[2] == 2 ? x | c : x ^ c; };
      low = with(low);
      high = with(high);
    }
    w.set_predicate(in.d, low);
    w.set_predicate(in.d2, high);
  };
}

// set.cmp.dtype.stype d, a, b: all ones or 1.0
void set(Decoder& s) {
  s.in.value[0] = truth_of(s);
  s.in.value[1] = s.take("ftz");
  const Type d = s.type(), t = s.type();
  s.in.value[3] = reinterpret_cast<int64_t>(compare_of(s, t));
  s.in.value[2] = d == Type::f32                         ? 0x3f800000
                  : d == Type::f16 || d == Type::f16x2   ? 0x3c00
                  : d == Type::bf16 || d == Type::bf16x2 ? 0x3f80
                                                         : 0xffffffff;
  s.in.d = s.out(0, d);
  s.in.a = s.source(1, t);
  s.in.b = s.source(2, t);
  s.in.execute = [](Warp& w, const Instruction& in) {
    uint32_t low, high = 0;
    reinterpret_cast<Compare>(in.value[3])(w, in, &low, &high);
    const bool pair = in.value[1] & 8;
    each_lane(w.mask, [&](int i) {
      uint64_t value = low >> i & 1 ? in.value[2] : 0;
      if (pair) value = (value & 0xffff) | (high >> i & 1 ? (in.value[2] & 0xffff) << 16 : 0);
      w.set_lane_value(in.d, i, value);
    });
  };
}

void selp(Decoder& s) {  // d = c ? a : b
  const Type t = s.type();
  s.in.d = s.out(0, t);
  s.in.a = s.source(1, t);
  s.in.b = s.source(2, t);
  s.in.c = s.source(3, Type::pred);
  auto of = [&]<class T>() {
    s.in.execute = [](Warp& w, const Instruction& in) {
      const uint32_t c = w.predicate(in.c);
      T* d = w.out<T>(in.d);
      const T *a = w.in<T>(in.a), *b = w.in<T>(in.b);
      each_lane(w.mask, [&](int i) { d[i] = c >> i & 1 ? a[i] : b[i]; });
    };
  };
  switch (bytes_of(t)) {
    case 2:
      return of.operator()<uint16_t>();
    case 4:
      return of.operator()<uint32_t>();
    case 8:
      return of.operator()<uint64_t>();
    default:
      s.unknown("unknown type");
  }
}

void slct(Decoder& s) {  // d = c >= 0 ? a : b
  const bool ftz = s.take("ftz");
  const Type t = s.type(), chooser = s.type();
  s.in.d = s.out(0, t);
  s.in.a = s.source(1, t);
  s.in.b = s.source(2, t);
  s.in.c = s.source(3, chooser);
  s.in.value[0] = chooser == Type::f32;
  s.in.value[1] = ftz;
  s.in.execute = [](Warp& w, const Instruction& in) {
    each_lane(w.mask, [&](int i) {
      const float x = w.in<float>(in.c)[i];
      const bool first = in.value[0] ? (in.value[1] ? flush(x) : x) >= 0 : w.in<int32_t>(in.c)[i] >= 0;
      w.set_lane_value(in.d, i, w.lane_value(first ? in.a : in.b, i));
    });
  };
}

void testp(Decoder& s) {
  constexpr std::string_view names[] = {"finite", "infinite", "number", "notanumber", "normal", "subnormal"};
  for (int k = 0; k < 6; ++k)
    if (s.take(names[k])) s.in.value[0] = k + 1;
  if (!s.in.value[0]) s.unknown("unknown test");
  const Type t = s.type();
  s.in.value[1] = t == Type::f64;
  s.in.d = s.out(0, Type::pred);
  s.in.a = s.source(1, t);
  s.in.execute = [](Warp& w, const Instruction& in) {
    uint32_t result = 0;
    for (int i = 0; i < 32; ++i) {
      const int kind = in.value[1] ? std::fpclassify(w.in<double>(in.a)[i]) : std::fpclassify(w.in<float>(in.a)[i]);
      const bool is[] = {kind != FP_NAN && kind != FP_INFINITE, kind == FP_INFINITE, kind != FP_NAN, kind == FP_NAN,
                         kind == FP_NORMAL || kind == FP_ZERO,  kind == FP_SUBNORMAL};
      result |= static_cast<uint32_t>(is[in.value[0] - 1]) << i;
    }
    w.set_predicate(in.d, result);
  };
}

}  // namespace

void compare_instructions(Table& table) {
  table.add({"setp"}, "", Class::integer, setp);
  table.add({"set"}, "", Class::integer, set);
  table.add({"selp"}, "", Class::move, selp);
  table.add({"slct"}, "", Class::move, slct);
  table.add({"testp"}, "f", Class::floating, testp);
}

}  // namespace emulator
