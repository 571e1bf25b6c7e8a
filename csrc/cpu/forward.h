// The forward kernel.
#pragma once

#include "core/kernels.h"

namespace ringattn::cpu {

// The keys of a tile in forward.
std::int32_t forward_key_tile(std::int64_t D);

// Instantiated for the four storage types.
template <typename T>
void forward(const BlockArgs& args, const Launch& launch);

}  // namespace ringattn::cpu
