// A mask is one interval per query: the query at global position p attends to the keys in [first_key(p), last_key(p)].
//
// Full, causal, sliding window and packed documents are all of this kind, and intersect by max and min. Both ends never
// decrease with p, so from segments and intervals the same few lines decide at three sizes (a rank and a block, a tile,
// an element) whether work is skipped, needs no mask, or needs one. No layout and no mask has a kernel of its own.
#pragma once

#include <cstdint>
#include <limits>

#include "core/segment.h"

namespace ringattn {

// How much of a (queries, keys) rectangle the mask lets through.
enum class Visibility : std::int32_t { skip, partial, full };

struct Mask {
  static constexpr std::int32_t kUnbounded = std::numeric_limits<std::int32_t>::max();

  std::int32_t key_count = 0;                     // keys of the whole sequence
  std::int32_t left = kUnbounded;                 // keys before p that are visible
  std::int32_t right = kUnbounded;                // keys after p that are visible; 0 is causal
  const std::int32_t* document_bounds = nullptr;  // [document_count + 1], rising from 0 to key_count; or null
  std::int32_t document_count = 0;

  RINGATTN_HOST_DEVICE std::int32_t first_key(std::int32_t position) const {
    const std::int32_t from_window = position > left ? position - left : 0;
    if (document_bounds == nullptr) return from_window;
    const std::int32_t from_document = document_bounds[document_of(position)];
    return from_window > from_document ? from_window : from_document;
  }

  // May be below first_key: then the row sees nothing (only a sequence without keys has such rows).
  RINGATTN_HOST_DEVICE std::int32_t last_key(std::int32_t position) const {
    const std::int32_t last = key_count - 1;
    const std::int32_t from_window = last - position > right ? position + right : last;
    if (document_bounds == nullptr) return from_window;
    const std::int32_t from_document = document_bounds[document_of(position) + 1] - 1;
    return from_window < from_document ? from_window : from_document;
  }

  // The same pairs from the other side: the queries that see the key at a position lie in [first_query, last_query].
  RINGATTN_HOST_DEVICE std::int32_t first_query(std::int32_t position) const {
    const std::int32_t from_window = position > right ? position - right : 0;
    if (document_bounds == nullptr) return from_window;
    const std::int32_t from_document = document_bounds[document_of(position)];
    return from_window > from_document ? from_window : from_document;
  }

  RINGATTN_HOST_DEVICE std::int32_t last_query(std::int32_t position) const {
    const std::int32_t from_window = kUnbounded - position > left ? position + left : kUnbounded;
    if (document_bounds == nullptr) return from_window;
    const std::int32_t document = document_of(position);  // the last one also has the queries behind all keys
    const std::int32_t from_document = document + 1 < document_count ? document_bounds[document + 1] - 1 : kUnbounded;
    return from_window < from_document ? from_window : from_document;
  }

  // The document that holds a position; with empty documents at the position, the one that is not empty.
  RINGATTN_HOST_DEVICE std::int32_t document_of(std::int32_t position) const {
    std::int32_t below = 0, above = document_count;  // document_bounds[below] <= position < document_bounds[above]
    while (above - below > 1) {
      const std::int32_t middle = below + (above - below) / 2;
      (document_bounds[middle] <= position ? below : above) = middle;
    }
    return below;
  }
};

namespace detail {

RINGATTN_HOST_DEVICE inline std::int64_t floor_divide(std::int64_t a, std::int64_t b) {
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

// The part of a segment that lies in [first, last].
RINGATTN_HOST_DEVICE inline Segment clip(const Segment& s, std::int64_t first, std::int64_t last) {
  std::int64_t from = first <= s.start ? 0 : (first - s.start + s.stride - 1) / s.stride;
  std::int64_t to = last < s.start ? -1 : (last - s.start) / s.stride;
  if (to > s.length - 1) to = s.length - 1;
  if (from > to) return {s.start, s.stride, 0};
  return s.part(static_cast<std::int32_t>(from), static_cast<std::int32_t>(to - from + 1));
}

// Is there a query q and a key k with first <= q - k <= last? Exact.
RINGATTN_HOST_DEVICE inline bool any_distance_within(const Segment& q, const Segment& k, std::int64_t first,
                                                     std::int64_t last) {
  if (q.length <= 0 || k.length <= 0) return false;
  if (q.stride == k.stride) {
    // q - k = offset + stride * c, where c takes every whole number from 1 - k.length to q.length - 1.
    const std::int64_t offset = std::int64_t{q.start} - k.start;
    std::int64_t c = -floor_divide(offset - first, q.stride);  // the smallest c that reaches `first`
    if (c < 1 - std::int64_t{k.length}) c = 1 - std::int64_t{k.length};
    return c <= q.length - 1 && offset + q.stride * c <= last;
  }
  for (std::int32_t i = 0; i < q.length; ++i) {
    const std::int64_t position = q.position(i);
    if (clip(k, position - last, position - first).length > 0) return true;
  }
  return false;
}

}  // namespace detail

// True if at least one query of q may see at least one key of k. Exact for every mask and stride.
RINGATTN_HOST_DEVICE inline bool any_visible(const Segment& q, const Segment& k, const Mask& mask) {
  if (q.length <= 0 || k.length <= 0) return false;
  const std::int64_t first = -std::int64_t{mask.right}, last = mask.left;
  if (mask.document_bounds == nullptr) return detail::any_distance_within(q, k, first, last);
  const std::int32_t q_first = mask.document_of(q.start), q_last = mask.document_of(q.last());
  const std::int32_t k_first = mask.document_of(k.start), k_last = mask.document_of(k.last());
  for (std::int32_t d = q_first > k_first ? q_first : k_first; d <= q_last && d <= k_last; ++d) {
    const std::int64_t from = mask.document_bounds[d], to = std::int64_t{mask.document_bounds[d + 1]} - 1;
    if (detail::any_distance_within(detail::clip(q, from, to), detail::clip(k, from, to), first, last)) return true;
  }
  return false;
}

// skip: no pair is visible. full: every pair is. partial: the mask must be applied. Exact.
RINGATTN_HOST_DEVICE inline Visibility visibility(const Segment& q, const Segment& k, const Mask& mask) {
  if (!any_visible(q, k, mask)) return Visibility::skip;
  const bool full = mask.first_key(q.last()) <= k.start && mask.last_key(q.start) >= k.last();
  return full ? Visibility::full : Visibility::partial;
}

// The same for all tokens of two ranks.
RINGATTN_HOST_DEVICE inline Visibility visibility(const Segments& queries, const Segments& keys, const Mask& mask) {
  bool any = false, all = true;
  for (const Segment& q : queries) {
    for (const Segment& k : keys) {
      if (q.length == 0 || k.length == 0) continue;
      const Visibility v = visibility(q, k, mask);
      any |= v != Visibility::skip;
      all &= v == Visibility::full;
    }
  }
  return !any ? Visibility::skip : all ? Visibility::full : Visibility::partial;
}

// The visible pairs, for work estimates and tests: sum over the queries of the keys each one sees.
inline std::int64_t visible_pairs(const Segments& queries, const Segments& keys, const Mask& mask) {
  std::int64_t pairs = 0;
  for (const Segment& q : queries) {
    for (std::int32_t i = 0; i < q.length; ++i) {
      const std::int32_t p = q.position(i);
      for (const Segment& k : keys) pairs += detail::clip(k, mask.first_key(p), mask.last_key(p)).length;
    }
  }
  return pairs;
}

}  // namespace ringattn
