// The cast of a finished gradient, float16.
#include "cuda/state.h"

using namespace ringattn;

extern "C" __global__ void __launch_bounds__(cuda::kSmallKernelThreads)
    ringattn_cast_fp16(const __grid_constant__ cuda::Params params) {
  if constexpr (cuda::kArch >= 80) cuda::cast<DType::float16>(params);
}
