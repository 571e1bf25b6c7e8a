// Which bytes a strided array takes.
#pragma once

#include <algorithm>
#include <vector>

#include "native/log.h"

namespace streams {

struct Dimension {
  std::int64_t size = 0, stride = 0;  // stride in elements, not negative
};

// In rising order; neighbours are one range.
inline Ranges ranges_of(const void* data, std::int64_t element_size, std::vector<Dimension> dimensions) {
  Ranges ranges;
  for (const Dimension& dimension : dimensions) {
    if (dimension.size == 0) return ranges;
  }
  std::erase_if(dimensions, [](const Dimension& one) { return one.size == 1 || one.stride == 0; });
  std::sort(dimensions.begin(), dimensions.end(),
            [](const Dimension& a, const Dimension& b) { return a.stride > b.stride; });
  std::int64_t run = 1;  // elements that lie side by side
  while (!dimensions.empty() && dimensions.back().stride <= run) {
    run += (dimensions.back().size - 1) * dimensions.back().stride;
    dimensions.pop_back();
  }
  std::vector<std::int64_t> starts{0};
  for (const Dimension& dimension : dimensions) {
    std::vector<std::int64_t> next;
    for (const std::int64_t start : starts) {
      for (std::int64_t i = 0; i < dimension.size; ++i) next.push_back(start + i * dimension.stride);
    }
    starts = std::move(next);
  }
  std::sort(starts.begin(), starts.end());
  const auto base = reinterpret_cast<std::uintptr_t>(data);
  for (const std::int64_t start : starts) {
    const std::uintptr_t begin = base + static_cast<std::uintptr_t>(start * element_size);
    const std::uintptr_t end = begin + static_cast<std::uintptr_t>(run * element_size);
    if (!ranges.empty() && begin <= ranges.back().second) {
      ranges.back().second = std::max(ranges.back().second, end);
    } else {
      ranges.emplace_back(begin, end);
    }
  }
  return ranges;
}

}  // namespace streams
