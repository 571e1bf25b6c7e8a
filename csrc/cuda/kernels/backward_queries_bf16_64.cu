// Backward by query tiles, bfloat16, head_dim up to 64.
#include "cuda/registry.h"
#include "cuda/sm80/backward_queries.h"

using namespace ringattn;

extern "C" __global__ void __launch_bounds__(cuda::shape_of(cuda::Kernel::backward_queries, cuda::kArch, 64).threads(),
                                             cuda::shape_of(cuda::Kernel::backward_queries, cuda::kArch, 64).blocks)
    ringattn_backward_queries_bf16_64(const __grid_constant__ cuda::Params params) {
  if constexpr (cuda::kArch >= 80) cuda::backward_queries<DType::bfloat16, 64>(params);
}

static const cuda::Registered registered("ringattn_backward_queries_bf16_64",
                                         reinterpret_cast<const void*>(ringattn_backward_queries_bf16_64));
