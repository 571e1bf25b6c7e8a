// Instructions that do the same to every lane: d = f(a, b, c), written as one lambda on one lane's values.
#pragma once

#include <type_traits>

#include "../machine/decoder.h"
#include "../machine/machine.h"

namespace emulator {

template <class F>
inline void each_lane(uint32_t mask, F f) {
  if (mask == kAll) {
    for (int lane = 0; lane < 32; ++lane) f(lane);
  } else {
    for (int lane = 0; lane < 32; ++lane)
      if (mask >> lane & 1) f(lane);
  }
}

template <class F, class D, class A>
void run_unary(Warp& w, const Instruction& in) {
  D* d = w.out<D>(in.d);
  const A* a = w.in<A>(in.a);
  each_lane(w.mask, [&](int i) { d[i] = static_cast<D>(F{}(a[i])); });
}
template <class F, class D, class A, class B>
void run_binary(Warp& w, const Instruction& in) {
  D* d = w.out<D>(in.d);
  const A* a = w.in<A>(in.a);
  const B* b = w.in<B>(in.b);
  each_lane(w.mask, [&](int i) { d[i] = static_cast<D>(F{}(a[i], b[i])); });
}
template <class F, class D, class A, class B, class C>
void run_ternary(Warp& w, const Instruction& in) {
  D* d = w.out<D>(in.d);
  const A* a = w.in<A>(in.a);
  const B* b = w.in<B>(in.b);
  const C* c = w.in<C>(in.c);
  each_lane(w.mask, [&](int i) { d[i] = static_cast<D>(F{}(a[i], b[i], c[i])); });
}

// The decoders: take operands of the given types, remember the function. F is a lambda without captures.
template <class D, class A, class F>
void unary(Decoder& s, Type d, Type a, F) {
  s.in.d = s.out(0, d);
  s.in.a = s.source(1, a);
  s.in.execute = run_unary<F, D, A>;
}
template <class D, class A, class B, class F>
void binary(Decoder& s, Type d, Type a, Type b, F) {
  s.in.d = s.out(0, d);
  s.in.a = s.source(1, a);
  s.in.b = s.source(2, b);
  s.in.execute = run_binary<F, D, A, B>;
}
template <class D, class A, class B, class C, class F>
void ternary(Decoder& s, Type d, Type a, Type b, Type c, F) {
  s.in.d = s.out(0, d);
  s.in.a = s.source(1, a);
  s.in.b = s.source(2, b);
  s.in.c = s.source(3, c);
  s.in.execute = run_ternary<F, D, A, B, C>;
}

// Calls f<T>() with the C++ type that holds one lane of an integer or bit type.
template <class F>
void with_integer(Decoder& s, Type type, F f) {
  switch (type) {
    case Type::u8:
    case Type::b8:
      return f.template operator()<uint8_t>();
    case Type::s8:
      return f.template operator()<int8_t>();
    case Type::u16:
    case Type::b16:
      return f.template operator()<uint16_t>();
    case Type::s16:
      return f.template operator()<int16_t>();
    case Type::u32:
    case Type::b32:
      return f.template operator()<uint32_t>();
    case Type::s32:
      return f.template operator()<int32_t>();
    case Type::u64:
    case Type::b64:
      return f.template operator()<uint64_t>();
    case Type::s64:
      return f.template operator()<int64_t>();
    default:
      s.unknown("an integer type expected");
  }
}

// The type of twice the width.
template <class T>
struct Wider;
template <>
struct Wider<uint8_t> {
  using type = uint16_t;
};
template <>
struct Wider<int8_t> {
  using type = int16_t;
};
template <>
struct Wider<uint16_t> {
  using type = uint32_t;
};
template <>
struct Wider<int16_t> {
  using type = int32_t;
};
template <>
struct Wider<uint32_t> {
  using type = uint64_t;
};
template <>
struct Wider<int32_t> {
  using type = int64_t;
};
template <>
struct Wider<uint64_t> {
  using type = unsigned __int128;
};
template <>
struct Wider<int64_t> {
  using type = __int128;
};

constexpr Type wider(Type type) {
  switch (type) {
    case Type::u16:
      return Type::u32;
    case Type::s16:
      return Type::s32;
    case Type::u32:
      return Type::u64;
    case Type::s32:
      return Type::s64;
    default:
      return Type::none;
  }
}

}  // namespace emulator
