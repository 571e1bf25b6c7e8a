// The tiles of keys that the queries of a call see, where these are few: then each query's keys of a tile are listed.
#pragma once

#include <vector>

#include "core/block_args.h"
#include "cpu/tiles.h"

namespace ringattn::cpu {

// The keys of a tile that a query sees.
struct KeyRange {
  std::int32_t begin = 0, end = 0;
  bool operator==(const KeyRange&) const = default;
};

// A tile of which some query sees some key; `ranges` is where those of the queries begin, or -1: all see all.
struct SeenTile {
  Tile keys;
  std::int64_t ranges = -1;
};

// What the queries of a call see, the same for all heads.
class SeenTiles {
 public:
  explicit SeenTiles(const BlockArgs& args) : Sq_(args.Sq) {
    for (const Segment& segment : args.query_segments) {
      for (std::int32_t i = 0; i < segment.length; ++i) {
        const std::int32_t position = segment.position(i);
        queries_.push_back({args.mask.first_key(position), args.mask.last_key(position)});
      }
    }
    for (const Tile& keys : make_tiles(args.key_segments, kTileKeys)) add(keys);
  }

  std::int64_t count() const { return static_cast<std::int64_t>(tiles_.size()); }
  const Tile& keys(std::int64_t tile) const { return tiles_[static_cast<std::size_t>(tile)].keys; }

  // Calls function(first_query, end_query, range) for queries that see the same keys of a tile.
  template <typename Function>
  void for_each_run(std::int64_t tile, const Function& function) const {
    const SeenTile& seen = tiles_[static_cast<std::size_t>(tile)];
    if (seen.ranges < 0) return function(0, Sq_, KeyRange{0, seen.keys.count()});
    const KeyRange* ranges = ranges_.data() + seen.ranges;
    for (std::int64_t first = 0, end = 0; first < Sq_; first = end) {
      while (end < Sq_ && ranges[end] == ranges[first]) ++end;
      if (ranges[first].begin < ranges[first].end) function(first, end, ranges[first]);
    }
  }

 private:
  struct Interval {
    std::int64_t first, last;  // positions of keys
  };

  void add(const Tile& keys) {
    const std::int64_t start = keys.segment.start, last = keys.segment.last(), stride = keys.segment.stride;
    bool all = true, any = false;
    for (const Interval& query : queries_) {
      all &= query.first <= start && last <= query.last;
      any |= query.first <= last && start <= query.last;
    }
    if (!any) return;
    if (all) return tiles_.push_back({keys});
    const auto clamp = [&](std::int64_t index) {
      return static_cast<std::int32_t>(std::clamp<std::int64_t>(index, 0, keys.count()));
    };
    const std::size_t ranges = ranges_.size();
    any = false;
    for (const Interval& query : queries_) {
      const std::int32_t begin = clamp(-detail::floor_divide(start - query.first, stride));
      const std::int32_t end = clamp(detail::floor_divide(query.last - start, stride) + 1);
      ranges_.push_back({begin, end});
      any |= begin < end;
    }
    if (any) {
      tiles_.push_back({keys, static_cast<std::int64_t>(ranges)});
    } else {
      ranges_.resize(ranges);
    }
  }

  std::int64_t Sq_;
  std::vector<Interval> queries_;
  std::vector<SeenTile> tiles_;
  std::vector<KeyRange> ranges_;
};

}  // namespace ringattn::cpu
