// Forward, float16, head_dim up to 256.
#include "cuda/registry.h"
#include "cuda/sm80/forward.h"

using namespace ringattn;

extern "C" __global__ void __launch_bounds__(cuda::shape_of(cuda::Kernel::forward, cuda::kArch, 256).threads(),
                                             cuda::shape_of(cuda::Kernel::forward, cuda::kArch, 256).blocks)
    ringattn_forward_fp16_256(const __grid_constant__ cuda::Params params) {
  if constexpr (cuda::kArch >= 80) cuda::forward<DType::float16, 256>(params);
}

static const cuda::Registered registered("ringattn_forward_fp16_256",
                                         reinterpret_cast<const void*>(ringattn_forward_fp16_256));
