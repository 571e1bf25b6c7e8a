// From the arguments of a block to launches: kernel, grid, thread block, shared memory, parameters. Pure functions of
// the host without the CUDA runtime, so that the launcher, the tests and a benchmark launch the same thing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/block_args.h"
#include "cuda/params.h"
#include "cuda/shapes.h"

namespace ringattn::cuda {

struct LaunchPlan {
  std::string kernel;  // the name of the __global__ function
  std::uint32_t grid = 0;
  std::uint32_t threads = 0;
  std::uint32_t shared_bytes = 0;
  Params params;
};

// arch is the one the kernels' code was generated for, as in 80; a list, since backward takes one kernel or two.
// Launches of nothing are left out. std::invalid_argument: no kernel for this dtype, head_dim or memory layout.
std::vector<LaunchPlan> plan_forward(const BlockArgs& block, int arch);
std::vector<LaunchPlan> plan_backward(const BlockArgs& block, int arch);
std::vector<LaunchPlan> plan_finalize(const BlockArgs& block);
std::vector<LaunchPlan> plan_merge(const BlockArgs& block);
std::vector<LaunchPlan> plan_delta(const BlockArgs& block);  // minus_* too, unless they are null
std::vector<LaunchPlan> plan_cast(const BlockArgs& block);   // out = grad_query, rounded to T

}  // namespace ringattn::cuda
