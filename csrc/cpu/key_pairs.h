// Rows as the products of bfloat16 pairs take them, and the keys and values of a chunk in backward.
#pragma once

#include <bit>
#include <iterator>
#include <vector>

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

inline float to_float(BFloat16 number) { return std::bit_cast<float>(std::uint32_t{number.bits} << 16); }

inline std::int64_t even(std::int64_t count) { return (count + 1) / 2 * 2; }

// Rows of a tile in scratch, an even number of them, with zeros beyond the tile and the head_dim. Special rows, which
// hold numbers that are not normal, are zeros there too: what they take part in is computed in float, so that no other
// row is touched by them. Where many are special, products of pairs are not worth it.
class PairRows {
 public:
  static std::int64_t elements(std::int64_t rows, std::int64_t D) { return even(rows) * padded(D); }

  PairRows(std::int64_t rows, std::int64_t D, Scratch& scratch)
      : D_(D), data_(scratch.take<std::uint16_t>(elements(rows, D))) {}

  void copy(RowSpan<const BFloat16> source, std::int64_t count) {
    special_.clear();
    if (count % 2 != 0) std::fill_n(row(count), padded(D_), std::uint16_t{0});
    if (copy(source, 0, count)) return;
    for (std::int64_t i = 0; i < count; ++i) {
      if (!copy(source, i, 1)) special_.push_back(static_cast<std::int32_t>(i));
    }
    for (const std::int32_t i : special_) clear(i);
  }

  void clear(std::int64_t index) { std::fill_n(row(index), padded(D_), std::uint16_t{0}); }

  std::uint16_t* row(std::int64_t index) const { return data_ + index * padded(D_); }
  const std::vector<std::int32_t>& special() const { return special_; }

 private:
  bool copy(RowSpan<const BFloat16> source, std::int64_t first, std::int64_t count) {
    return pair_kernels().copy_normal(reinterpret_cast<const std::uint16_t*>(source.row(first)), source.stride,
                                      row(first), padded(D_), count, D_, padded(D_));
  }

  std::int64_t D_;
  std::uint16_t* data_;
  std::vector<std::int32_t> special_;
};

// Copies two arrays of rows of the same tokens; a token that is special in one is special. Returns these, in order.
inline std::vector<std::int32_t> copy_both(PairRows& a, RowSpan<const BFloat16> from_a, PairRows& b,
                                           RowSpan<const BFloat16> from_b, std::int64_t count) {
  a.copy(from_a, count);
  b.copy(from_b, count);
  std::vector<std::int32_t> special;
  std::set_union(a.special().begin(), a.special().end(), b.special().begin(), b.special().end(),
                 std::back_inserter(special));
  for (const std::int32_t i : special) a.clear(i), b.clear(i);
  return special;
}

inline bool are_few(const std::vector<std::int32_t>& special, std::int64_t count) {
  return static_cast<std::int64_t>(special.size()) * 8 <= std::max(count, kLanes);
}

// Copied when first asked for: a tile that no query sees is never read.
class KeyPairs {
 public:
  static constexpr int kArrays = 3;
  static std::int64_t elements(const BlockArgs& args, std::int64_t max_keys) {
    return 3 * PairRows::elements(max_keys, args.D);
  }

  KeyPairs(const BlockArgs& args, std::int64_t b, std::int64_t kv_head, std::int64_t max_keys, Scratch& scratch)
      : args_(args),
        b_(b),
        kv_head_(kv_head),
        key_(max_keys, args.D, scratch),
        value_(max_keys, args.D, scratch),
        key_pairs_(scratch.take<std::uint16_t>(PairRows::elements(max_keys, args.D))) {}

  void move_to(const Tile& keys) {
    keys_ = keys;
    copied_ = has_key_pairs_ = false;
  }

  // Whether products of pairs are worth it: few keys are special.
  bool is_worth_it() {
    if (!copied_) {
      copied_ = true;
      special_ = copy_both(key_, source(args_.key), value_, source(args_.value), keys_.count());
    }
    return are_few(special_, keys_.count());
  }

  // After is_worth_it(): the special keys; rows that are zeros for them; and the rows as they are.
  const std::vector<std::int32_t>& special() const { return special_; }
  const std::uint16_t* key(std::int64_t row) const { return key_.row(row); }
  const std::uint16_t* value(std::int64_t row) const { return value_.row(row); }

  // Pairs of rows of keys, [keys / 2][D][2], from an even row on.
  const std::uint16_t* key_pairs(std::int64_t row) {
    if (!has_key_pairs_) {
      pair_kernels().pair_rows(key_.row(0), padded(args_.D), key_pairs_, even(keys_.count()), padded(args_.D));
    }
    has_key_pairs_ = true;
    return key_pairs_ + row * padded(args_.D);
  }

 private:
  RowSpan<const BFloat16> source(const Rows& rows) const {
    return rows_at<const BFloat16>(rows, b_, kv_head_, keys_.row);
  }

  const BlockArgs& args_;
  const std::int64_t b_, kv_head_;
  Tile keys_;
  PairRows key_, value_;
  std::uint16_t* key_pairs_;
  std::vector<std::int32_t> special_;
  bool copied_ = false, has_key_pairs_ = false;
};

}  // namespace ringattn::cpu
