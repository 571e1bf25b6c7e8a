// Tiles of segments, and which queries of a tile see which keys of another.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/kernels.h"
#include "cpu/micro.h"

namespace ringattn::cpu {

// Keys of a tile of scores. Twice as many were no faster.
inline constexpr std::int32_t kTileKeys = 64;

// Neighbouring tokens of one segment: their positions, and their first row in the rank's local order.
struct Tile {
  Segment segment;
  std::int64_t row = 0;

  std::int32_t count() const { return segment.length; }
};

inline std::vector<Tile> make_tiles(const Segments& segments, std::int32_t size) {
  std::vector<Tile> tiles;
  std::int64_t row = 0;
  for (const Segment& segment : segments) {
    for (std::int64_t offset = 0; offset < segment.length; offset += size) {
      const std::int32_t first = static_cast<std::int32_t>(offset);
      tiles.push_back({segment.part(first, std::min(size, segment.length - first)), row + offset});
    }
    row += segment.length;
  }
  return tiles;
}

// Query tiles of a head, next to one another in a list, that a task takes together: several, where that still leaves
// enough tasks to keep many threads evenly busy. What a tile computes does not depend on its group.
struct TileGroups {
  const std::vector<Tile>& tiles;
  std::int64_t size, per_head;

  TileGroups(const std::vector<Tile>& tiles, std::int64_t heads) : tiles(tiles) {
    const std::int64_t count = static_cast<std::int64_t>(tiles.size());
    size = std::clamp<std::int64_t>(heads * count / kManyTasks, 1, kMaxSize);
    per_head = (count + size - 1) / size;
  }

  const Tile* begin(std::int64_t group) const { return tiles.data() + group * size; }
  const Tile* end(std::int64_t group) const {
    return tiles.data() + std::min<std::int64_t>((group + 1) * size, static_cast<std::int64_t>(tiles.size()));
  }

 private:
  static constexpr std::int64_t kManyTasks = 64, kMaxSize = 4;
};

// The visible pairs of a partly visible tile. Both ends of a query's interval never decrease with its position, so the
// queries that see a given key are neighbours as well.
struct VisiblePairs {
  std::int32_t first_key = 0, end_key = 0;        // keys that any query of the tile sees lie in [first_key, end_key)
  std::int32_t begin[kTileKeys], end[kTileKeys];  // key n is seen by the queries in [begin[n], end[n])
  bool sees[kLanes];                              // the query sees a key of the tile; false beyond the tile's end

  // No pair is visible.
  VisiblePairs() : begin{}, end{}, sees{} {}

  VisiblePairs(const Segment& queries, const Segment& keys, const Mask& mask) {
    std::int32_t from[kLanes], to[kLanes];  // query i sees the keys in [from[i], to[i])
    const auto clamp = [&](std::int64_t index) {
      return static_cast<std::int32_t>(std::clamp<std::int64_t>(index, 0, keys.length));
    };
    for (std::int32_t i = 0; i < kLanes; ++i) {
      sees[i] = false;
      if (i >= queries.length) continue;
      const std::int32_t position = queries.position(i);
      const std::int64_t first = std::int64_t{mask.first_key(position)} - keys.start;
      const std::int64_t last = std::int64_t{mask.last_key(position)} - keys.start;
      from[i] = clamp(-detail::floor_divide(-first, keys.stride));
      to[i] = clamp(detail::floor_divide(last, keys.stride) + 1);
      sees[i] = from[i] < to[i];
    }
    std::int32_t begin_query = 0, end_query = 0;
    first_key = keys.length;
    for (std::int32_t n = 0; n < keys.length; ++n) {
      while (begin_query < queries.length && to[begin_query] <= n) ++begin_query;
      while (end_query < queries.length && from[end_query] <= n) ++end_query;
      begin[n] = begin_query;
      end[n] = std::max(begin_query, end_query);
      if (begin[n] == end[n]) continue;
      first_key = std::min(first_key, n);
      end_key = n + 1;
    }
    first_key = std::min(first_key, end_key);
  }

  // Adds the queries [from, to) of key n, a later one than those before.
  void show(std::int32_t n, std::int32_t from, std::int32_t to) {
    if (from >= to) return;
    if (first_key == end_key) first_key = n;
    end_key = n + 1;
    begin[n] = from, end[n] = to;
  }

  // The first of an even number of rows that hold all keys from first_key to end_key, and the one behind the last.
  std::int32_t even_first() const { return first_key / 2 * 2; }
  std::int32_t even_end() const { return (end_key + 1) / 2 * 2; }

  // As fill_invisible, for rows [even_end() - even_first()][kLanes].
  template <typename Number>
  void fill_invisible_even(Number* rows, Number value) const {
    if (even_first() < first_key) std::fill(rows, rows + kLanes, value);
    if (end_key < even_end()) std::fill_n(rows + (end_key - even_first()) * kLanes, kLanes, value);
    fill_invisible(rows + (first_key - even_first()) * kLanes, value);
  }

  // Zeros in place of the invisible pairs of numbers [(even_end() - even_first()) / 2][kLanes][2].
  void clear_invisible_pairs(std::uint16_t* pairs) const {
    for (std::int32_t n = even_first(); n < even_end(); ++n) {
      const bool outside = n < first_key || n >= end_key;
      const std::int32_t from = outside ? 0 : begin[n], to = outside ? 0 : end[n];
      std::uint16_t* row = pairs + (n - even_first()) / 2 * 2 * kLanes + n % 2;
      for (std::int32_t i = 0; i < from; ++i) row[2 * i] = 0;
      for (std::int32_t i = to; i < kLanes; ++i) row[2 * i] = 0;
    }
  }

  // Puts a value in place of the invisible pairs of scores [end_key - first_key][kLanes].
  template <typename A>
  void fill_invisible(A* scores, A value) const {
    for (std::int32_t n = first_key; n < end_key; ++n, scores += kLanes) {
      std::fill(scores, scores + begin[n], value);
      std::fill(scores + end[n], scores + kLanes, value);
    }
  }
};

// Runs the tasks as the caller wants them run.
inline void run_tasks(const Launch& launch, std::int64_t count, const std::function<void(std::int64_t)>& task) {
  if (count <= 0) return;
  if (launch.parallel) {
    launch.parallel(count, task);
  } else {
    for (std::int64_t i = 0; i < count; ++i) task(i);
  }
}

}  // namespace ringattn::cpu
