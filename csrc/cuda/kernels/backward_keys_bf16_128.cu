// Backward by key tiles, bfloat16, head_dim up to 128.
#include "cuda/registry.h"
#include "cuda/sm80/backward_keys.h"

using namespace ringattn;

extern "C" __global__ void __launch_bounds__(cuda::shape_of(cuda::Kernel::backward_keys, cuda::kArch, 128).threads(),
                                             cuda::shape_of(cuda::Kernel::backward_keys, cuda::kArch, 128).blocks)
    ringattn_backward_keys_bf16_128(const __grid_constant__ cuda::Params params) {
  if constexpr (cuda::kArch >= 80) cuda::backward_keys<DType::bfloat16, 128>(params);
}

static const cuda::Registered registered("ringattn_backward_keys_bf16_128",
                                         reinterpret_cast<const void*>(ringattn_backward_keys_bf16_128));
