// The keys and values of a tile as rows of the accumulation type, for all query tiles of a task.
#pragma once

#include "cpu/scratch.h"
#include "cpu/storage.h"
#include "cpu/tiles.h"

namespace ringattn::cpu {

// Rows are used where they are if they are in A and near one another, else copied to scratch when they are first asked
// for: a tile that no query sees is never read.
template <typename T>
class KeyTile {
  using A = Accumulator<T>;

 public:
  static constexpr int kArrays = 2;
  static std::int64_t bytes(const BlockArgs& args, std::int64_t max_keys) {
    return 2 * max_keys * padded(args.D) * static_cast<std::int64_t>(sizeof(A));
  }
  static bool is_in_place(const BlockArgs& args) {
    return is_in_place(args, args.key) && is_in_place(args, args.value);
  }

  KeyTile(const BlockArgs& args, std::int64_t max_keys, Scratch& scratch) : args_(args) {
    key_.copy = scratch.take<A>(max_keys * padded(args.D));
    value_.copy = scratch.take<A>(max_keys * padded(args.D));
  }

  void move_to(std::int64_t b, std::int64_t kv_head, const Tile& keys) {
    b_ = b;
    kv_head_ = kv_head;
    keys_ = keys;
    key_.ready = value_.ready = false;
  }

  // Before tasks share it.
  void make_ready() {
    key(0);
    value(0);
  }

  // From a row of the tile on.
  RowSpan<const A> key(std::int64_t first) { return rows(args_.key, key_, first); }
  RowSpan<const A> value(std::int64_t first) { return rows(args_.value, value_, first); }

 private:
  struct Operand {
    A* copy;  // [max_keys][D]
    bool ready = false;
    RowSpan<const A> rows = {};
  };

  // Far apart, every row costs a page of the address translation cache, in every product that reads it.
  static bool is_in_place(const BlockArgs& args, const Rows& rows) {
    return kIsAccumulator<T> && rows.token_stride <= 2 * args.D;
  }

  RowSpan<const A> rows(const Rows& source, Operand& operand, std::int64_t first) {
    if (!operand.ready) {
      const RowSpan<const T> span = rows_at<const T>(source, b_, kv_head_, keys_.row);
      operand.ready = true;
      operand.rows = {operand.copy, padded(args_.D)};
      if constexpr (kIsAccumulator<T>) {
        if (is_in_place(args_, source)) operand.rows = span;
      }
      if (operand.rows.data == operand.copy) copy_rows<T>(span, keys_.count(), args_.D, operand.copy);
    }
    return {operand.rows.row(first), operand.rows.stride};
  }

  const BlockArgs& args_;
  std::int64_t b_ = 0, kv_head_ = 0;
  Tile keys_;
  Operand key_, value_;
};

}  // namespace ringattn::cpu
