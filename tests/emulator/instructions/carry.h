// add.cc and its like, which integer.cpp meets.
#pragma once

#include "../machine/decoder.h"

namespace emulator {

void carry(Decoder& s);  // add sub mad with .cc, and addc subc madc

}  // namespace emulator
