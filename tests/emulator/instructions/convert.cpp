// cvt and cvt.pack: between integers, floats and the narrow float formats.
#include "families.h"
#include "lanes.h"
#include "rounding.h"

namespace emulator {

namespace {

struct Conversion {  // in Instruction::value
  Type to, from;
  Round round;
  bool ftz, sat, to_integer, relu, finite;
};

bool is_float(Type t) {
  return t == Type::f16 || t == Type::bf16 || t == Type::f32 || t == Type::f64 || t == Type::tf32;
}

double read_float(uint64_t bits, Type t) {
  switch (t) {
    case Type::f16:
      return from_half(static_cast<uint16_t>(bits));
    case Type::bf16:
      return from_bfloat(static_cast<uint16_t>(bits));
    case Type::f64:
      return std::bit_cast<double>(bits);
    default:
      return std::bit_cast<float>(static_cast<uint32_t>(bits));
  }
}

double to_whole(double x, Round round) {
  switch (round) {
    case Round::zero:
      return std::trunc(x);
    case Round::down:
      return std::floor(x);
    case Round::up:
      return std::ceil(x);
    default:
      return std::nearbyint(x);
  }
}

__int128 read_integer(uint64_t bits, Type t) {
  const int shift = 64 - 8 * bytes_of(t);
  return is_signed(t) ? __int128{static_cast<int64_t>(bits << shift) >> shift}
                      : __int128{static_cast<uint64_t>(bits << shift) >> shift};
}

__int128 lowest(Type t) { return is_signed(t) ? -(__int128{1} << (8 * bytes_of(t) - 1)) : 0; }
__int128 highest(Type t) { return (__int128{1} << (8 * bytes_of(t) - (is_signed(t) ? 1 : 0))) - 1; }
__int128 clamp(__int128 x, Type t) { return x < lowest(t) ? lowest(t) : x > highest(t) ? highest(t) : x; }

uint64_t write_float(double x, const Conversion& c) {
  if (c.sat) x = x > 0 ? std::min(x, 1.0) : 0;
  if (c.relu) x = x > 0 || std::isnan(x) ? x : 0.0;
  switch (c.to) {
    case Type::f16:
      return encode(x, kHalf, c.round, c.finite);
    case Type::bf16:
      return encode(x, kBfloat, c.round, c.finite);
    case Type::tf32:
      return encode(x, kTf32, c.round, c.finite) << 13;
    case Type::f64:
      return std::bit_cast<uint64_t>(x);
    default: {
      float narrow =
          c.round == Round::nearest ? static_cast<float>(x) : std::bit_cast<float>(encode(x, kSingle, c.round));
      if (c.ftz) narrow = flush(narrow);
      return std::bit_cast<uint32_t>(narrow);
    }
  }
}

// An integer to a float in one rounding, 64-bit ones too.
double integer_to_odd(__int128 x) {
  const double near = static_cast<double>(x);
  const __int128 error = x - static_cast<__int128>(near);
  if (error == 0 || std::bit_cast<uint64_t>(near) & 1) return near;
  return std::bit_cast<double>(std::bit_cast<uint64_t>(near) + ((error > 0) == (near > 0) ? 1 : -1));
}
double integer_to_double(__int128 x, Round round) {
  const double near = static_cast<double>(x);
  const __int128 error = x - static_cast<__int128>(near);
  if (round == Round::nearest || error == 0) return near;
  if (round == Round::up) return error > 0 ? std::nextafter(near, INFINITY) : near;
  if (round == Round::down) return error < 0 ? std::nextafter(near, -INFINITY) : near;
  return (error > 0) == (near > 0) ? near : std::nextafter(near, 0.0);
}

uint64_t convert(uint64_t bits, const Conversion& c) {
  if (is_float(c.from)) {
    double x = read_float(bits, c.from);
    if (c.ftz && c.from == Type::f32) x = flush(static_cast<float>(x));
    if (is_float(c.to)) return write_float(c.to_integer ? to_whole(x, c.round) : x, c);
    if (std::isnan(x)) return bytes_of(c.to) == 8 ? uint64_t{1} << 63 : 0;
    x = to_whole(x, c.round);
    if (x >= 0x1p64) return static_cast<uint64_t>(highest(c.to));
    if (x <= -0x1p64) return static_cast<uint64_t>(lowest(c.to));
    return static_cast<uint64_t>(clamp(static_cast<__int128>(x), c.to));
  }
  const __int128 x = read_integer(bits, c.from);
  if (c.to == Type::f64) return std::bit_cast<uint64_t>(integer_to_double(x, c.round));
  if (is_float(c.to)) {
    const double odd = integer_to_odd(x);
    if (c.to == Type::f32) return encode(c.sat ? (odd > 0 ? std::min(odd, 1.0) : 0) : odd, kSingle, c.round);
    return write_float(odd, c);
  }
  return static_cast<uint64_t>(c.sat ? clamp(x, c.to) : x);
}

void run_convert(Warp& w, const Instruction& in) {
  const Conversion& c = *reinterpret_cast<const Conversion*>(in.value);
  const uint64_t keep = bytes_of(c.to) == 8 ? ~0ull : (1ull << 8 * bytes_of(c.to)) - 1;
  each_lane(w.mask, [&](int i) {
    uint64_t found = convert(w.lane_value(in.a, i), c);
    found =
        is_signed(c.to) ? static_cast<uint64_t>(read_integer(found, c.to)) : found & keep;  // fills a wider register
    w.set_lane_value(in.d, i, found);
  });
}

// Integers of register width without saturation: the frequent case.
template <class D, class A>
void run_resize(Warp& w, const Instruction& in) {
  run_unary<decltype([](A a) { return static_cast<D>(a); }), D, A>(w, in);
}
bool resize(Decoder& s, Type d, Type a) {
  if (s.in.d.bytes != bytes_of(d) || s.in.a.bytes != bytes_of(a)) return false;
  auto from = [&]<class A>() {
    if (bytes_of(d) == 8) s.in.execute = run_resize<uint64_t, A>;
    if (bytes_of(d) == 4) s.in.execute = run_resize<uint32_t, A>;
    if (bytes_of(d) == 2) s.in.execute = run_resize<uint16_t, A>;
  };
  with_integer(s, a, from);
  return s.in.execute != nullptr;
}

// d = {a high, b low}
void run_pack(Warp& w, const Instruction& in) {
  Conversion c = *reinterpret_cast<const Conversion*>(in.value);
  const bool bf = c.to == Type::bf16x2;
  each_lane(w.mask, [&](int i) {
    if (c.to == Type::bf16x2 || c.to == Type::f16x2) {
      Conversion one = c;
      one.to = bf ? Type::bf16 : Type::f16;
      float high = w.in<float>(in.a)[i], low = w.in<float>(in.b)[i];
      if (c.ftz) high = flush(high), low = flush(low);
      if (one.round == Round::nearest && !c.relu && !c.finite) {
        w.out<uint32_t>(in.d)[i] = bf ? static_cast<uint32_t>(to_bfloat(high)) << 16 | to_bfloat(low)
                                      : static_cast<uint32_t>(to_half(high)) << 16 | to_half(low);
      } else {
        w.out<uint32_t>(in.d)[i] = static_cast<uint32_t>(write_float(high, one) << 16 | write_float(low, one));
      }
      return;
    }
    const Format format = c.to == Type::e4m3x2 ? kE4m3 : kE5m2;  // pairs of 8-bit floats
    double high, low;
    if (c.from == Type::f32) {
      high = w.in<float>(in.a)[i];
      low = w.in<float>(in.b)[i];
    } else {
      const uint32_t both = w.in<uint32_t>(in.a)[i];
      high = from_half(static_cast<uint16_t>(both >> 16));
      low = from_half(static_cast<uint16_t>(both));
    }
    if (c.relu) high = high > 0 || std::isnan(high) ? high : 0, low = low > 0 || std::isnan(low) ? low : 0;
    w.set_lane_value(in.d, i, encode(high, format, c.round, true) << 8 | encode(low, format, c.round, true));
  });
}

void run_unpack8(Warp& w, const Instruction& in) {  // f16x2 from two 8-bit floats
  const Conversion& c = *reinterpret_cast<const Conversion*>(in.value);
  const Format format = c.from == Type::e4m3x2 ? kE4m3 : kE5m2;
  each_lane(w.mask, [&](int i) {
    const auto both = static_cast<uint32_t>(w.lane_value(in.a, i));
    auto part = [&](uint32_t code) { return encode(decode_number(code, format), kHalf, Round::nearest); };
    w.out<uint32_t>(in.d)[i] = part(both >> 8 & 255) << 16 | part(both & 255);
  });
}

void cvt(Decoder& s) {
  static_assert(sizeof(Conversion) <= sizeof(s.in.value));
  auto& c = *reinterpret_cast<Conversion*>(s.in.value);
  const std::string word = s.take_one({"rna", "rni", "rzi", "rmi", "rpi", "rn", "rz", "rm", "rp"});
  c.round = round_named(word);
  c.to_integer = word.size() == 3 && word != "rna";
  c.ftz = s.take("ftz");
  c.sat = s.take("sat");
  c.relu = s.take("relu");
  c.finite = s.take("satfinite");
  c.to = s.type();
  c.from = s.type();
  if (c.to == Type::f16x2 && (c.from == Type::e4m3x2 || c.from == Type::e5m2x2)) {
    s.in.d = s.out(0, c.to);
    s.in.a = s.source(1, c.from);
    s.in.execute = run_unpack8;
    return;
  }
  if (facts(c.to).family == 'x' && c.to != Type::tf32) {
    s.in.d = s.out(0, c.to);
    s.in.a = s.source(1, c.from);
    if (c.from == Type::f32) s.in.b = s.source(2, c.from);
    if (c.from != Type::f32 && c.from != Type::f16x2) s.unknown("unknown conversion");
    s.in.execute = run_pack;
    return;
  }
  s.in.d = s.any_out(0);
  s.in.a = s.any_source(1, c.from);
  if (!s.in.d.present || s.in.d.bytes < bytes_of(c.to) || s.in.a.bytes < bytes_of(c.from))
    s.unknown("register too narrow");
  const bool floats = is_float(c.to) || is_float(c.from);
  if (!floats && !c.sat && resize(s, c.to, c.from)) return;
  if (c.to == Type::f32 && c.from == Type::bf16 && !c.sat)
    return unary<float, uint16_t>(s, c.to, c.from, [](uint16_t a) { return from_bfloat(a); });
  if (c.to == Type::f32 && c.from == Type::f16 && !c.sat)
    return unary<float, uint16_t>(s, c.to, c.from, [](uint16_t a) { return from_half(a); });
  if (word == "rn" && !c.ftz && !c.sat && !c.relu && !c.finite) {
    if (c.to == Type::f32 && c.from == Type::s32)
      return unary<float, int32_t>(s, c.to, c.from, [](int32_t a) { return static_cast<float>(a); });
    if (c.to == Type::f32 && c.from == Type::u32)
      return unary<float, uint32_t>(s, c.to, c.from, [](uint32_t a) { return static_cast<float>(a); });
    if (c.to == Type::bf16 && c.from == Type::f32)
      return unary<uint16_t, float>(s, c.to, c.from, [](float a) { return to_bfloat(a); });
    if (c.to == Type::f16 && c.from == Type::f32)
      return unary<uint16_t, float>(s, c.to, c.from, [](float a) { return to_half(a); });
  }
  s.in.execute = run_convert;
}

void cvt_pack(Decoder& s) {  // cvt.pack.sat.{u8,s8}.s32.b32 d, a, b, c and .{u16,s16}.s32 d, a, b
  s.need("sat");
  const Type t = s.type(), from = s.type();
  const bool chained = s.next_type() == Type::b32;
  if (chained) s.type();
  if (from != Type::s32) s.unknown("unknown form");
  s.in.d = s.out(0, Type::b32);
  s.in.a = s.source(1, from);
  s.in.b = s.source(2, from);
  if (chained) s.in.c = s.source(3, Type::b32);
  s.in.value[0] = static_cast<int64_t>(t);
  s.in.execute = [](Warp& w, const Instruction& in) {
    const Type t = static_cast<Type>(in.value[0]);
    const int bits = 8 * bytes_of(t);
    each_lane(w.mask, [&](int i) {
      auto part = [&](const Operand& o) {
        return static_cast<uint32_t>(clamp(w.in<int32_t>(o)[i], t)) & ((1u << bits) - 1);
      };
      const uint32_t pair = part(in.a) << bits | part(in.b);
      w.out<uint32_t>(in.d)[i] = in.c.present ? w.in<uint32_t>(in.c)[i] << 2 * bits | pair : pair;
    });
  };
}

}  // namespace

void convert_instructions(Table& table) {
  table.add({"cvt"}, "", Class::conversion, [](Decoder& s) { s.take("pack") ? cvt_pack(s) : cvt(s); });
}

}  // namespace emulator
