// Merging two states, bfloat16.
#include "cuda/registry.h"
#include "cuda/state.h"

using namespace ringattn;

extern "C" __global__ void __launch_bounds__(cuda::kSmallKernelThreads)
    ringattn_merge_bf16(const __grid_constant__ cuda::Params params) {
  if constexpr (cuda::kArch >= 80) cuda::merge(params);
}

static const cuda::Registered registered("ringattn_merge_bf16", reinterpret_cast<const void*>(ringattn_merge_bf16));
