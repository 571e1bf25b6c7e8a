// cvt of pairs of narrow floats, and cvt.pack of pairs of integers.
#include "convert.h"

namespace emulator {

namespace {

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

}  // namespace

bool convert_packed(Decoder& s, const Conversion& c) {
  if (facts(c.to).family != 'x' || c.to == Type::tf32) return false;
  s.in.d = s.out(0, c.to);
  s.in.a = s.source(1, c.from);
  if (c.to == Type::f16x2 && (c.from == Type::e4m3x2 || c.from == Type::e5m2x2)) {
    s.in.execute = run_unpack8;
    return true;
  }
  if (c.from == Type::f32) s.in.b = s.source(2, c.from);
  if (c.from != Type::f32 && c.from != Type::f16x2) s.unknown("unknown conversion");
  s.in.execute = run_pack;
  return true;
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

}  // namespace emulator
