// The forward kernel.
#pragma once

#include "core/kernels.h"

namespace ringattn::cpu {

// Instantiated for the four storage types.
template <typename T>
void forward(const BlockArgs& args, const Launch& launch);

}  // namespace ringattn::cpu
