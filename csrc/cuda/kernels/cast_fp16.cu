// The cast of a finished gradient, float16.
#include "cuda/registry.h"
#include "cuda/state.h"

using namespace ringattn;

extern "C" __global__ void __launch_bounds__(cuda::kSmallKernelThreads)
    ringattn_cast_fp16(const __grid_constant__ cuda::Params params) {
  if constexpr (cuda::kArch >= 80) cuda::cast<DType::float16>(params);
}

static const cuda::Registered registered("ringattn_cast_fp16", reinterpret_cast<const void*>(ringattn_cast_fp16));
