// Forward, float16, head_dim up to 64.
#include "cuda/registry.h"
#include "cuda/sm80/forward.h"

using namespace ringattn;

extern "C" __global__ void __launch_bounds__(cuda::shape_of(cuda::Kernel::forward, cuda::kArch, 64).threads(),
                                             cuda::shape_of(cuda::Kernel::forward, cuda::kArch, 64).blocks)
    ringattn_forward_fp16_64(const __grid_constant__ cuda::Params params) {
  if constexpr (cuda::kArch >= 80) cuda::forward<DType::float16, 64>(params);
}

static const cuda::Registered registered("ringattn_forward_fp16_64",
                                         reinterpret_cast<const void*>(ringattn_forward_fp16_64));
