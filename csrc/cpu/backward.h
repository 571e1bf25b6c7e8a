// The backward kernel.
#pragma once

#include "core/kernels.h"

namespace ringattn::cpu {

// Adds to the gradients that are wanted. Instantiated for the four storage types.
template <typename T>
void backward(const BlockArgs& args, const Launch& launch);

}  // namespace ringattn::cpu
