// The block kernels of GPUs, launched: plans of plan.h on the current device of the calling thread.
#pragma once

#include "core/kernels.h"
#include "cuda/plan.h"

namespace ringattn::cuda {

// Launch::stream is a cudaStream_t. All pointers of the arguments, the mask's document bounds too, are of the device.
// Kernels do not synchronise with the host. std::invalid_argument: as the plans; std::runtime_error: what CUDA says.
const KernelTable& kernels();

void launch(const LaunchPlan& plan, void* stream);

}  // namespace ringattn::cuda
