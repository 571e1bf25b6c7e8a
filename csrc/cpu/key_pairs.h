// The keys and values of a tile as the products of bfloat16 pairs take them, for all query tiles of a task.
#pragma once

#include "cpu/scratch.h"
#include "cpu/storage.h"
#include "cpu/tiles.h"

namespace ringattn::cpu {

inline const Pairs& pair_kernels() { return micro_table().pairs; }

// Whether this instruction set has products of pairs, and T is what they multiply.
template <typename T>
bool multiplies_pairs() {
  return std::is_same_v<T, BFloat16> && pair_kernels().multiply != nullptr;
}

inline std::int64_t even(std::int64_t count) { return (count + 1) / 2 * 2; }

// Rows of a tile in scratch, an even number of them, with zeros beyond the tile and the head_dim.
class PairRows {
 public:
  static std::int64_t elements(std::int64_t rows, std::int64_t D) { return even(rows) * padded(D); }

  PairRows(std::int64_t rows, std::int64_t D, Scratch& scratch)
      : D_(D), data_(scratch.take<std::uint16_t>(elements(rows, D))) {}

  // Returns whether the products take the numbers as they are.
  bool copy(RowSpan<const BFloat16> source, std::int64_t count) {
    const std::int64_t length = padded(D_);
    if (count % 2 != 0) std::fill_n(data_ + count * length, length, std::uint16_t{0});
    return pair_kernels().copy_normal(reinterpret_cast<const std::uint16_t*>(source.data), source.stride, data_, length,
                                      count, D_, length);
  }

  const std::uint16_t* row(std::int64_t index) const { return data_ + index * padded(D_); }
  std::uint16_t* data() { return data_; }

 private:
  std::int64_t D_;
  std::uint16_t* data_;
};

// Copied when first asked for: a tile that no query sees is never read.
class KeyPairs {
 public:
  static constexpr int kArrays = 4;
  static std::int64_t elements(const BlockArgs& args, std::int64_t max_keys) {
    return 4 * PairRows::elements(max_keys, args.D);
  }

  KeyPairs(const BlockArgs& args, std::int64_t b, std::int64_t kv_head, std::int64_t max_keys, Scratch& scratch)
      : args_(args),
        b_(b),
        kv_head_(kv_head),
        key_(max_keys, args.D, scratch),
        value_(max_keys, args.D, scratch),
        key_pairs_(scratch.take<std::uint16_t>(PairRows::elements(max_keys, args.D))),
        value_pairs_(scratch.take<std::uint16_t>(PairRows::elements(max_keys, args.D))) {}

  void move_to(const Tile& keys) {
    keys_ = keys;
    copied_ = false;
    has_key_pairs_ = has_value_pairs_ = false;
  }

  // Whether the products take all numbers of the tile as they are.
  bool is_normal() {
    if (!copied_) {
      copied_ = true;
      normal_ = key_.copy(rows_at<const BFloat16>(args_.key, b_, kv_head_, keys_.row), keys_.count());
      normal_ &= value_.copy(rows_at<const BFloat16>(args_.value, b_, kv_head_, keys_.row), keys_.count());
    }
    return normal_;
  }

  // After is_normal().
  const std::uint16_t* key(std::int64_t row) const { return key_.row(row); }
  const std::uint16_t* value(std::int64_t row) const { return value_.row(row); }

  // Pairs of rows, [keys / 2][D][2], from an even row on.
  const std::uint16_t* key_pairs(std::int64_t row) { return pairs(key_, key_pairs_, has_key_pairs_, row); }
  const std::uint16_t* value_pairs(std::int64_t row) { return pairs(value_, value_pairs_, has_value_pairs_, row); }

 private:
  const std::uint16_t* pairs(const PairRows& rows, std::uint16_t* target, bool& has, std::int64_t row) {
    if (!has) pair_kernels().pair_rows(rows.row(0), padded(args_.D), target, even(keys_.count()), padded(args_.D));
    has = true;
    return target + row * padded(args_.D);
  }

  const BlockArgs& args_;
  const std::int64_t b_, kv_head_;
  Tile keys_;
  PairRows key_, value_;
  std::uint16_t *key_pairs_, *value_pairs_;
  bool copied_ = false, normal_ = false, has_key_pairs_ = false, has_value_pairs_ = false;
};

}  // namespace ringattn::cpu
