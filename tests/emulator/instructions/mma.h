// Forms of mma.sync that other files decode.
#pragma once

#include "../machine/decoder.h"

namespace emulator {

void mma_double(Decoder& s, int rows, int k_size);  // mma_double.cpp

}  // namespace emulator
