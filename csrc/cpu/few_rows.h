// The forward kernel of calls with few queries, as in decoding.
#pragma once

#include "core/kernels.h"

namespace ringattn::cpu {

// Whether a call is for forward_few_rows. Depends on Sq alone: a pass cut into calls over its keys stays
// with one kernel.
bool has_few_rows(const BlockArgs& args);

// As forward. Instantiated for the four storage types.
template <typename T>
void forward_few_rows(const BlockArgs& args, const Launch& launch);

}  // namespace ringattn::cpu
