// What the two files of conversions share.
#pragma once

#include "lanes.h"
#include "rounding.h"

namespace emulator {

struct Conversion {  // in Instruction::value
  Type to, from;
  Round round;
  bool ftz, sat, to_integer, relu, finite;
};

constexpr __int128 lowest(Type t) { return is_signed(t) ? -(__int128{1} << (8 * bytes_of(t) - 1)) : 0; }
constexpr __int128 highest(Type t) { return (__int128{1} << (8 * bytes_of(t) - (is_signed(t) ? 1 : 0))) - 1; }
constexpr __int128 clamp(__int128 x, Type t) { return x < lowest(t) ? lowest(t) : x > highest(t) ? highest(t) : x; }

uint64_t write_float(double x, const Conversion& c);  // the code of x in c.to

// convert_packed.cpp
bool convert_packed(Decoder& s, const Conversion& c);  // pairs of narrow floats; false: c is none of them
void cvt_pack(Decoder& s);

}  // namespace emulator
