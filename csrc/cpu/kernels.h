// The block kernels of the CPU: exact attention of one block of keys and values, forward and backward.
#pragma once

#include "core/kernels.h"

namespace ringattn::cpu {

// float64, float32, bfloat16 and float16; any D from 1 to 256; any strides with a last one of 1. The results do not
// depend on how Launch::parallel spreads the tasks. The instruction set is chosen at the first call; the environment
// variable RINGATTN_CPU (generic, avx2, avx512, avx512_bf16) asks for another one. Throws std::invalid_argument for
// another word, or for an instruction set that this machine or this build lacks.
const KernelTable& kernels();

}  // namespace ringattn::cpu
