// Which tiles a mask leaves work in. A warp decides 32 tiles at a time, one per lane, with the functions of
// core/mask.h, so the decision is exact for every layout and mask, and costs a few instructions per tile.
#pragma once

#include "core/mask.h"
#include "cuda/ptx.h"

namespace ringattn::cuda {

// The part of segment i of the tokens that lies in [offset, offset + count) in local order; possibly empty.
__device__ __forceinline__ Segment part_of(const Segments& tokens, int i, std::int32_t offset, std::int32_t count) {
  const Segment& segment = tokens.items[i];
  if (i > 0) offset -= tokens.items[0].length;
  const std::int32_t from = offset > 0 ? offset : 0;
  const std::int32_t to = offset + count < segment.length ? offset + count : segment.length;
  return segment.part(from, i < tokens.count && from < to ? to - from : 0);
}

__device__ __forceinline__ std::int32_t position_of(const Segments& tokens, std::int32_t index) {
  const std::int32_t first = tokens.items[0].length;
  return index < first ? tokens.items[0].position(index) : tokens.items[1].position(index - first);
}

// A tile, or none, in one register.
struct Tile {
  std::int32_t code = -1;

  __device__ __forceinline__ bool exists() const { return code >= 0; }
  __device__ __forceinline__ std::int32_t index() const { return code >> 1; }
  __device__ __forceinline__ bool is_full() const { return code & 1; }  // every pair is visible, and the tile is whole
};

// Walks upwards over the key tiles that a query tile sees at least one pair of; or over the query tiles that see at
// least one pair of a key tile.
template <bool kWalksKeys, int kQueries, int kKeys>
class VisibleTiles {
 public:
  __device__ VisibleTiles(const BlockArgs& block, std::int32_t own_tile) : block_(block), own_tile_(own_tile) {}

  __device__ __forceinline__ Tile next() {
    while (visible_ == 0) {
      if (first_ >= tile_count()) return {};
      look();
    }
    const int bit = __ffs(visible_) - 1;
    const Tile tile{(first_ - 32 + bit) << 1 | static_cast<std::int32_t>(full_ >> bit & 1)};
    visible_ &= visible_ - 1;
    return tile;
  }

  __device__ __forceinline__ void restart() { first_ = 0; }

 private:
  __device__ std::int32_t tile_count() const {
    return static_cast<std::int32_t>(kWalksKeys ? (block_.Skv + kKeys - 1) / kKeys
                                                : (block_.Sq + kQueries - 1) / kQueries);
  }

  __device__ __forceinline__ void look() {
    const std::int32_t other = first_ + threadIdx.x % 32;
    Visibility found = Visibility::skip;
    if (other < tile_count()) {
      const std::int32_t query = (kWalksKeys ? own_tile_ : other) * kQueries;
      const std::int32_t key = (kWalksKeys ? other : own_tile_) * kKeys;
      bool any = false, all = key + kKeys <= block_.Skv && (kWalksKeys || query + kQueries <= block_.Sq);
      const int key_segments = block_.key_segments.count, pairs = block_.query_segments.count * key_segments;
#pragma unroll 1
      for (int pair = 0; pair < pairs; ++pair) {
        const int i = key_segments == 1 ? pair : pair / kMaxSegments;
        const Segment queries = part_of(block_.query_segments, i, query, kQueries);
        const Segment keys = part_of(block_.key_segments, pair - i * key_segments, key, kKeys);
        if (queries.length == 0 || keys.length == 0) continue;
        const Visibility of_pair = visibility(queries, keys, block_.mask);
        any |= of_pair != Visibility::skip;
        all &= of_pair == Visibility::full;
      }
      found = !any ? Visibility::skip : all ? Visibility::full : Visibility::partial;
    }
    visible_ = __ballot_sync(kWholeWarp, found != Visibility::skip);
    full_ = __ballot_sync(kWholeWarp, found == Visibility::full);
    first_ += 32;
  }

  const BlockArgs& block_;
  std::int32_t own_tile_;
  std::int32_t first_ = 0;  // of the next 32 tiles
  std::uint32_t visible_ = 0, full_ = 0;
};

}  // namespace ringattn::cuda
