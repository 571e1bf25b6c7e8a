// Holds a stream back, so that what was copied on it took as long as over a link of a chosen speed: see device.h.
#include <cstdint>

#include "cuda/registry.h"

namespace {

__device__ std::int64_t now() {
  std::int64_t nanoseconds;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
  return nanoseconds;
}

}  // namespace

extern "C" __global__ void ringattn_pace(std::int64_t* start, std::int64_t nanoseconds) {
  if (nanoseconds == 0) {
    *start = now();
  } else {
    while (now() - *start < nanoseconds) __nanosleep(100);
  }
}

static const ringattn::cuda::Registered registered("ringattn_pace", reinterpret_cast<const void*>(ringattn_pace));
