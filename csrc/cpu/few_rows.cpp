// The forward kernel of few queries: bound by the time it takes to read keys and values, once.
//
// The query heads of a key head are rows of one task, r = query * group + head, so that they share its reading. Per
// tile of keys and row, with c = scale * log2(e):
//   S[n] = sum_d q[d] * K[n][d]       m_t = max_n S[n]       P[n] = 2^(c * (S[n] - m_t))
//   l_t  = sum_n P[n]                 o_t[d] = sum_n round(P[n]) * V[n][d]
// over the keys of the tile that the row sees, and nothing else: a tile is split where rows see different keys of it.
// Then the state absorbs the tile, in the order of tiles, with m' = max(m, m_t):
//   l = l * 2^(c * (m - m')) + l_t * 2^(c * (m_t - m'))       o likewise       m = m'
//
// (m_t, l_t, o_t) depends on the tile alone, and this is all that the state ever takes from it. So chunks of tiles may
// be worked on by several threads, whatever their number, and a pass cut into calls on tile boundaries gives the bits
// of one call.
#include "cpu/few_rows.h"

#include <mutex>

#include "cpu/key_pairs.h"
#include "cpu/row_states.h"
#include "cpu/scratch.h"
#include "cpu/seen_tiles.h"
#include "cpu/state.h"
#include "cpu/tiles.h"

namespace ringattn::cpu {
namespace {

static_assert(kTileKeys <= kFewRowsKeys);

constexpr std::int64_t kMaxQueries = 32;       // of a head; with more, a lane per query is about as fast
constexpr std::int64_t kMaxRows = 64;          // that a task takes together
constexpr std::int64_t kMinPairRows = 3;       // fewer are done before the next keys have come from memory
constexpr std::int64_t kManyTasks = 64;        // enough to keep threads evenly busy
constexpr std::int64_t kMinChunkTiles = 8;     // worth a task
constexpr std::int64_t kChunkBytes = 1 << 18;  // of (m_t, l_t, o_t) that a chunk makes

// Rows [first, first + count) of a key head.
struct RowGroup {
  std::int64_t b, kv_head, first, count;
};

// One call. Its tasks are chunks of tiles of a row group; chunks are absorbed in order by whichever thread has what
// comes next, and no task ever waits for another.
template <typename T>
class Forward {
  using A = Accumulator<T>;

 public:
  explicit Forward(const BlockArgs& args)
      : args_(args),
        seen_(args),
        heads_per_group_(args.Hq / args.Hkv),
        rows_(args.Sq * heads_per_group_),
        D_((args.D + kFewRowsPadding - 1) / kFewRowsPadding * kFewRowsPadding),
        groups_((rows_ + kMaxRows - 1) / kMaxRows),
        chains_(static_cast<std::size_t>(args.B * args.Hkv * groups_)) {
    const std::int64_t tiles = seen_.count(), chains = static_cast<std::int64_t>(chains_.size());
    const std::int64_t tile_bytes = std::min(rows_, kMaxRows) * (D_ + 2) * static_cast<std::int64_t>(sizeof(A));
    chunk_tiles_ = std::max(std::min(tiles * chains / kManyTasks, kChunkBytes / tile_bytes), kMinChunkTiles);
    chunks_ = std::max<std::int64_t>((tiles + chunk_tiles_ - 1) / chunk_tiles_, 1);
  }

  // Neighbouring tasks are of different heads: then most find the state free, and absorb their tiles as they go.
  void run(const Launch& launch) {
    const std::int64_t chains = static_cast<std::int64_t>(chains_.size());
    run_tasks(launch, chains * chunks_, [&](std::int64_t task) { run_chunk(task % chains, task / chains); });
  }

 private:
  // A row group's state, which absorbs chunks in order. It belongs to the thread that has chunk `next`.
  struct Chain {
    std::mutex mutex;
    std::int64_t next = 0;
    RowStates<A> state;
    std::vector<RowStates<A>> waiting;  // what later chunks make of the rows, as far as they are done
  };

  // What a thread works in.
  struct Work {
    A *query, *p, *key, *value;
    std::uint16_t* pairs;  // or null
    FewRowsState<A> own;
  };

  RowGroup group_of(std::int64_t chain) const {
    const std::int64_t head = chain / groups_, first = chain % groups_ * kMaxRows;
    return {head / args_.Hkv, head % args_.Hkv, first, std::min(kMaxRows, rows_ - first)};
  }

  void run_chunk(std::int64_t index, std::int64_t chunk) {
    Chain& chain = chains_[static_cast<std::size_t>(index)];
    const RowGroup group = group_of(index);
    const std::int64_t first = chunk * chunk_tiles_, end = std::min(first + chunk_tiles_, seen_.count());
    const Work work = begin_work(group);
    bool is_next;
    {
      const std::lock_guard lock(chain.mutex);
      if (chain.waiting.empty()) chain.waiting.resize(static_cast<std::size_t>(chunks_));
      is_next = chain.next == chunk;
    }
    if (is_next) {
      if (chunk == 0) load_state(chain, group);
      for (std::int64_t tile = first; tile < end; ++tile) {
        attend(group, work, tile, work.own);
        absorb(group, chain.state, tile, work.own);
      }
      finish_chunk(chain, group, chunk + 1);
      return;
    }
    RowStates<A> made = spare_.take([&] { return RowStates<A>(chunk_tiles_, std::min(rows_, kMaxRows), D_); });
    for (std::int64_t tile = first; tile < end; ++tile) attend(group, work, tile, made.at(tile - first, 0));
    {
      const std::lock_guard lock(chain.mutex);
      chain.waiting[static_cast<std::size_t>(chunk)] = std::move(made);
      if (chain.next != chunk) return;  // whoever has the state will find it
    }
    finish_chunk(chain, group, chunk);
  }

  // Absorbs the chunks that wait, from `next` on, on the thread that has the state; then another may have it.
  void finish_chunk(Chain& chain, const RowGroup& group, std::int64_t next) {
    for (;; ++next) {
      RowStates<A> made;
      {
        const std::lock_guard lock(chain.mutex);
        chain.next = next;
        if (next == chunks_) break;
        made = std::move(chain.waiting[static_cast<std::size_t>(next)]);
        if (!made.is_there()) return;
      }
      const std::int64_t first = next * chunk_tiles_, end = std::min(first + chunk_tiles_, seen_.count());
      for (std::int64_t tile = first; tile < end; ++tile) absorb(group, chain.state, tile, made.at(tile - first, 0));
      spare_.give(std::move(made));
    }
    store_state(chain, group);
  }

  Work begin_work(const RowGroup& group) const {
    Scratch& scratch = Scratch::of_this_thread();
    const std::int64_t count = group.count, copied = copies_rows() ? kTileKeys * D_ : 0;
    const std::int64_t scores = count * std::max(kFewRowsKeys, D_);
    scratch.reserve((3 * count * D_ + scores + 2 * count + 2 * copied) * static_cast<std::int64_t>(sizeof(A)), 8);
    Work work;
    work.query = scratch.take<A>(count * D_);
    work.p = scratch.take<A>(scores);
    work.key = scratch.take<A>(copied);
    work.value = scratch.take<A>(copied);
    work.pairs = uses_pairs() ? scratch.take<std::uint16_t>(count * D_) : nullptr;
    work.own = {scratch.take<A>(count * D_), scratch.take<A>(count), scratch.take<A>(count)};
    for (std::int64_t r = 0; r < count; ++r) {
      const auto [h, i] = head_and_query(group, r);
      const RowSpan<const T> query = rows_at<const T>(args_.query, group.b, h, i);
      if (work.pairs != nullptr) work.pairs = copy_pairs(query.data, work.pairs, r);
      widen(query, 1, work.query + r * D_);
      if (!has_even_odd()) continue;
      std::copy_n(work.query + r * D_, D_, work.p);
      split_columns(work.p, work.query + r * D_);
    }
    return work;
  }

  // Products of pairs are for several rows: with one or two, the memory is what takes time.
  bool uses_pairs() const { return multiplies_pairs<T>() && !copies_rows() && rows_ >= kMinPairRows; }

  // Row r of the queries to target; or null, if products of pairs, which take numbers below 2^-126 for 0, would be
  // wrong: this one holds such, or numbers so large that they are seen in keys.
  std::uint16_t* copy_pairs(const T* query, std::uint16_t* target, std::int64_t r) const {
    if constexpr (std::is_same_v<T, BFloat16>) {
      for (std::int64_t d = 0; d < D_; ++d) {
        const float size = std::abs(to_float(query[d]));
        if (!(size == 0 || (size >= 0x1p-126f && size * args_.scale < 0x1p64))) return nullptr;
        target[r * D_ + d] = query[d].bits;
      }
    }
    return target;
  }

  // Rows in A, with zeros from args.D to D.
  void widen(RowSpan<const T> source, std::int64_t count, A* target) const {
    if constexpr (kIsAccumulator<T>) {
      for (std::int64_t i = 0; i < count; ++i, target += D_) {
        std::copy_n(source.row(i), args_.D, target);
        std::fill(target + args_.D, target + D_, A{0});
      }
    } else {
      const Conversions& conversions = micro_table().conversions;
      const auto convert = std::is_same_v<T, BFloat16> ? conversions.widen_bfloat16 : conversions.widen_float16;
      convert(reinterpret_cast<const std::uint16_t*>(source.data), source.stride, target, D_, count, args_.D, D_);
    }
  }

  // The even columns of a row before the odd ones, and back.
  bool has_even_odd() const { return std::is_same_v<T, BFloat16> && !copies_rows(); }

  void split_columns(const A* source, A* target) const {
    for (std::int64_t d = 0; d < D_; d += 2) target[d / 2] = source[d], target[(D_ + d) / 2] = source[d + 1];
  }

  void join_columns(const A* source, A* target) const {
    for (std::int64_t d = 0; d < D_; d += 2) target[d] = source[d / 2], target[d + 1] = source[(D_ + d) / 2];
  }

  struct HeadAndQuery {
    std::int64_t head, query;
  };

  HeadAndQuery head_and_query(const RowGroup& group, std::int64_t r) const {
    const std::int64_t row = group.first + r;
    return {group.kv_head * heads_per_group_ + row % heads_per_group_, row / heads_per_group_};
  }

  // Rows whose length is not that of whole vectors get zeros at their end.
  bool copies_rows() const { return args_.D != D_; }

  // Calls function(first_row, count, range) for rows of the group that see the same keys of a tile.
  template <typename Function>
  void for_each_run(const RowGroup& group, std::int64_t tile, const Function& function) const {
    seen_.for_each_run(tile, [&](std::int64_t first, std::int64_t end, const KeyRange& range) {
      first = std::max<std::int64_t>(first * heads_per_group_ - group.first, 0);
      end = std::min(end * heads_per_group_ - group.first, group.count);
      if (first < end) function(first, end - first, range);
    });
  }

  void attend(const RowGroup& group, const Work& work, std::int64_t tile, const FewRowsState<A>& made) const {
    const FewRowsLoops& loops = micro_table().few_rows;
    const Tile& keys = seen_.keys(tile);
    const RowSpan<const T> key = rows_at<const T>(args_.key, group.b, group.kv_head, keys.row);
    const RowSpan<const T> value = rows_at<const T>(args_.value, group.b, group.kv_head, keys.row);
    if (copies_rows()) {
      widen(key, keys.count(), work.key);
      widen(value, keys.count(), work.value);
    }
    for_each_run(group, tile, [&](std::int64_t first, std::int64_t count, const KeyRange& range) {
      FewRows<A> few = {.key = key.row(range.begin),
                        .value = value.row(range.begin),
                        .key_stride = key.stride,
                        .value_stride = value.stride,
                        .keys = range.end - range.begin,
                        .query = work.query + first * D_,
                        .pairs = work.pairs == nullptr ? nullptr : work.pairs + first * D_,
                        .rows = count,
                        .D = D_,
                        .c = static_cast<A>(args_.scale * kLog2E),
                        .rounding = kRounding<T>,
                        .p = work.p,
                        .o = made.o + first * D_,
                        .m = made.m + first,
                        .l = made.l + first};
      if (copies_rows()) {
        few.key = work.key + range.begin * D_, few.value = work.value + range.begin * D_;
        few.key_stride = few.value_stride = D_;
      }
      if constexpr (std::is_same_v<T, double>) {
        loops.attend_float64(few);
      } else if (std::is_same_v<T, BFloat16> && !copies_rows()) {
        loops.attend_bfloat16(few);
      } else if (std::is_same_v<T, Float16> && !copies_rows()) {
        loops.attend_float16(few);
      } else {
        loops.attend_float32(few);
      }
    });
  }

  void absorb(const RowGroup& group, const RowStates<A>& state, std::int64_t tile, const FewRowsState<A>& made) const {
    for_each_run(group, tile, [&](std::int64_t first, std::int64_t count, const KeyRange&) {
      const A c = static_cast<A>(args_.scale * kLog2E);
      const FewRowsState<A> added = {made.o + first * D_, made.m + first, made.l + first};
      if constexpr (std::is_same_v<A, double>) {
        micro_table().few_rows.absorb_float64(state.at(0, first), added, count, D_, c);
      } else {
        micro_table().few_rows.absorb_float32(state.at(0, first), added, count, D_, c);
      }
    });
  }

  void load_state(Chain& chain, const RowGroup& group) const {
    chain.state = RowStates<A>(1, group.count, D_);
    for (std::int64_t r = 0; r < group.count; ++r) {
      const FewRowsState<A> to = chain.state.at(0, r);
      std::fill_n(to.o, D_, A{0});
      *to.m = kMinusInfinity<A>, *to.l = A{0};
      if (!args_.load_state) continue;
      const std::int64_t row = row_of(group, r);
      const A* o = static_cast<const A*>(args_.o) + row * args_.D;
      if (has_even_odd()) {
        split_columns(o, to.o);
      } else {
        std::copy_n(o, args_.D, to.o);
      }
      *to.m = static_cast<const A*>(args_.m)[row], *to.l = static_cast<const A*>(args_.l)[row];
    }
  }

  // Writes what the call asks for: the state, or the result, or both.
  void store_state(const Chain& chain, const RowGroup& group) const {
    const RowStates<A> joined(1, 1, D_);
    for (std::int64_t r = 0; r < group.count; ++r) {
      FewRowsState<A> from = chain.state.at(0, r);
      if (has_even_odd()) {
        join_columns(from.o, joined.at(0, 0).o);
        from.o = joined.at(0, 0).o;
      }
      const std::int64_t row = row_of(group, r);
      if (args_.store_state) {
        std::copy_n(from.o, args_.D, static_cast<A*>(args_.o) + row * args_.D);
        static_cast<A*>(args_.m)[row] = *from.m, static_cast<A*>(args_.l)[row] = *from.l;
      }
      if (!args_.finalize) continue;
      const auto [h, i] = head_and_query(group, r);
      finish_row<T>(from.o, *from.m, *from.l, args_.scale, args_.D, rows_at<T>(args_.out, group.b, h, i).data,
                    static_cast<A*>(args_.lse) + row);
    }
  }

  std::int64_t row_of(const RowGroup& group, std::int64_t r) const {
    const auto [h, i] = head_and_query(group, r);
    return state_row(args_, group.b, h) + i;
  }

  const BlockArgs& args_;
  const SeenTiles seen_;
  const std::int64_t heads_per_group_, rows_ /*of a key head*/, D_ /*padded*/, groups_ /*per key head*/;
  std::int64_t chunk_tiles_, chunks_;
  std::vector<Chain> chains_;
  Spare<A> spare_;
};

}  // namespace

bool has_few_rows(const BlockArgs& args) { return args.Sq <= kMaxQueries; }

template <typename T>
void forward_few_rows(const BlockArgs& args, const Launch& launch) {
  if (args.B * args.Hq * args.Sq == 0) return;
  Forward<T>(args).run(launch);
}

template void forward_few_rows<double>(const BlockArgs&, const Launch&);
template void forward_few_rows<float>(const BlockArgs&, const Launch&);
template void forward_few_rows<BFloat16>(const BlockArgs&, const Launch&);
template void forward_few_rows<Float16>(const BlockArgs&, const Launch&);

}  // namespace ringattn::cpu
