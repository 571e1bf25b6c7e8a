// cvt between integers and floats of one element; pairs are in convert_packed.cpp.
#include "convert.h"
#include "families.h"

namespace emulator {

namespace {

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
  if (convert_packed(s, c)) return;
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

}  // namespace

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

void convert_instructions(Table& table) {
  table.add({"cvt"}, "", Class::conversion, [](Decoder& s) { s.take("pack") ? cvt_pack(s) : cvt(s); });
}

}  // namespace emulator
