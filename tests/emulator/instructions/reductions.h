// What atomics and reductions do to one element of memory: atom, red, red.async, and the bulk reductions.
#pragma once

#include "../machine/decoder.h"

namespace emulator {

enum Reduction { kAdd, kMin, kMax, kAnd, kOr, kXor, kInc, kDec, kExch, kCas };
constexpr std::string_view kReductionNames[] = {"add", "min", "max", "and", "or", "xor", "inc", "dec", "exch", "cas"};

// One element at `at` becomes operation(old, b, c); c only for cas.
using Reduce = void (*)(int operation, uint8_t* at, const uint8_t* b, const uint8_t* c);

Reduce reduce_of(Type type);                        // null: no type of reductions
int take_reduction(Decoder& s);                     // the suffix that names one; an error if there is none
bool has_reduction(int operation, Type type);       // of one element, by atom and red
bool has_wide_reduction(int operation, Type type);  // of vectors and by bulk copies

}  // namespace emulator
