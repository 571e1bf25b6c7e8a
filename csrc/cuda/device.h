// What a GPU can run, and what its streams are doing.
#pragma once

#include <cstdint>

#include "core/kernels.h"

namespace ringattn::cuda {

// For the KernelTable. The driver is asked once for each GPU that is fit, and again for one that is not.
Obstacle obstacle(DType dtype, std::int64_t head_dim, int device_index);
std::uint64_t capture(void* stream);

// The architecture that the kernels' code for the current device was generated for, as in 80.
int code_arch();

// Keeps the stream busy until `nanoseconds` have passed since pace(start, 0, stream) was reached; start is of the
// device. A copy between the two takes at least that long, as over a slower link.
void pace(std::int64_t* start, std::int64_t nanoseconds, void* stream);

}  // namespace ringattn::cuda
