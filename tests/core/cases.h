// Masks for tests, what a mask means by definition, and how masks and segments are printed.
#pragma once

#include <algorithm>
#include <ostream>
#include <vector>

#include "check.h"
#include "core/layout.h"
#include "core/mask.h"
#include "core/segment.h"

namespace ringattn {

inline std::ostream& operator<<(std::ostream& stream, const Segment& s) {
  return stream << "(start " << s.start << ", stride " << s.stride << ", length " << s.length << ")";
}

inline std::ostream& operator<<(std::ostream& stream, const Layout& layout) {
  return stream << layout_name(layout.kind()) << " P=" << layout.world_size() << " N=" << layout.seq_len();
}

inline std::ostream& operator<<(std::ostream& stream, const Mask& mask) {
  stream << "keys " << mask.key_count << " window (" << mask.left << ", " << mask.right << ")";
  if (mask.document_bounds == nullptr) return stream;
  stream << " documents";
  for (std::int32_t i = 0; i <= mask.document_count; ++i) stream << " " << mask.document_bounds[i];
  return stream;
}

namespace test {

inline constexpr LayoutKind kLayouts[] = {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped};
inline constexpr std::int32_t kUnbounded = Mask::kUnbounded;
inline constexpr std::int32_t kLargest = 2147483647;  // 2^31 - 1

// A mask that owns its documents.
struct OwnedMask {
  std::int32_t key_count = 0, left = kUnbounded, right = kUnbounded;
  std::vector<std::int32_t> bounds;

  Mask mask() const {
    Mask result{.key_count = key_count, .left = left, .right = right};
    if (bounds.empty()) return result;
    result.document_bounds = bounds.data();
    result.document_count = static_cast<std::int32_t>(bounds.size()) - 1;
    return result;
  }
};

// The definition: is the key visible to the query, both given by their global positions?
inline bool allowed(const Mask& mask, std::int64_t query, std::int64_t key) {
  if (key < 0 || key >= mask.key_count) return false;
  if (mask.left != kUnbounded && query - key > mask.left) return false;
  if (mask.right != kUnbounded && key - query > mask.right) return false;
  for (std::int32_t d = 0; d < mask.document_count; ++d) {
    const auto holds = [&](std::int64_t position) {
      return mask.document_bounds[d] <= position && position < mask.document_bounds[d + 1];
    };
    if (holds(query) != holds(key)) return false;
  }
  return true;
}

inline std::vector<std::int64_t> positions(const Segments& segments) {
  std::vector<std::int64_t> result;
  for (const Segment& s : segments) {
    for (std::int64_t i = 0; i < s.length; ++i) result.push_back(s.start + s.stride * i);
  }
  return result;
}

inline std::vector<std::int64_t> positions(const Segment& segment) { return positions(Segments{{segment}, 1}); }

// Bounds of documents from 0 to `count`, cut inside [from, to]; some are empty.
inline std::vector<std::int32_t> random_documents(Random& random, std::int64_t count, std::int64_t from,
                                                  std::int64_t to) {
  std::vector<std::int32_t> bounds = {0, static_cast<std::int32_t>(count)};
  for (std::int64_t cuts = between(random, 0, 6); cuts > 0; --cuts) {
    const auto cut = static_cast<std::int32_t>(between(random, from, to));
    bounds.insert(bounds.end(), static_cast<std::size_t>(between(random, 1, 2)), cut);
  }
  if (between(random, 0, 3) == 0) bounds.push_back(0);
  if (between(random, 0, 3) == 0) bounds.push_back(static_cast<std::int32_t>(count));
  std::sort(bounds.begin(), bounds.end());
  return bounds;
}

// Any window, any documents cut inside [from, to]; `distance` is a typical width.
inline OwnedMask random_mask(Random& random, std::int64_t key_count, std::int64_t from, std::int64_t to,
                             std::int64_t distance) {
  const auto side = [&]() -> std::int32_t {
    switch (between(random, 0, 5)) {
      case 0:
        return 0;
      case 1:
        return kUnbounded;
      case 2:
        return static_cast<std::int32_t>(between(random, kLargest - distance, kLargest - 1));
      default:
        return static_cast<std::int32_t>(between(random, 1, distance));
    }
  };
  OwnedMask result{.key_count = static_cast<std::int32_t>(key_count), .left = side(), .right = side(), .bounds = {}};
  if (key_count > 0 && between(random, 0, 1) == 0) result.bounds = random_documents(random, key_count, from, to);
  return result;
}

}  // namespace test
}  // namespace ringattn
