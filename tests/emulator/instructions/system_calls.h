// Functions that CUDA's run time brings: vprintf, __assertfail.
#pragma once

#include "../machine/decoder.h"

namespace emulator {

// Decodes the call whose callee is operand `at` if it is one of them; whether it is.
bool system_call(Decoder& s, int at);

}  // namespace emulator
