// A segment: global positions start, start + stride, … that are neighbours in a rank's local order.
//
// Everything that needs a position (mask, RoPE, sharding, labels) takes it from the segments of a layout. These types
// are plain data, so that the kernels of every device can take them by value.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define RINGATTN_HOST_DEVICE __host__ __device__
#else
#define RINGATTN_HOST_DEVICE
#endif

namespace ringattn {

struct Segment {
  std::int32_t start = 0;
  std::int32_t stride = 1;  // > 0
  std::int32_t length = 0;

  RINGATTN_HOST_DEVICE std::int32_t position(std::int32_t index) const { return start + stride * index; }
  RINGATTN_HOST_DEVICE std::int32_t last() const { return position(length - 1); }

  // The part [offset, offset + count) in local order, for example a tile.
  RINGATTN_HOST_DEVICE Segment part(std::int32_t offset, std::int32_t count) const {
    return {position(offset), stride, count};
  }
};

inline constexpr int kMaxSegments = 2;

// The tokens of one rank, in local order.
struct Segments {
  Segment items[kMaxSegments];
  std::int32_t count = 0;

  RINGATTN_HOST_DEVICE const Segment* begin() const { return items; }
  RINGATTN_HOST_DEVICE const Segment* end() const { return items + count; }

  RINGATTN_HOST_DEVICE std::int32_t length() const {
    std::int32_t total = 0;
    for (const Segment& segment : *this) total += segment.length;
    return total;
  }
};

}  // namespace ringattn
