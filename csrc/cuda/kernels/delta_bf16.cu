// What backward needs of every row, bfloat16.
#include "cuda/registry.h"
#include "cuda/state.h"

using namespace ringattn;

extern "C" __global__ void __launch_bounds__(cuda::kSmallKernelThreads)
    ringattn_delta_bf16(const __grid_constant__ cuda::Params params) {
  if constexpr (cuda::kArch >= 80) cuda::delta<DType::bfloat16>(params);
}

static const cuda::Registered registered("ringattn_delta_bf16", reinterpret_cast<const void*>(ringattn_delta_bf16));
