// A tile of keys and values as forward's products of bfloat16 pairs take them.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/key_pairs.h"

namespace ringattn::cpu {

// K as rows, V as pairs of rows, [keys / 2][D][2]; what is special is zeros in both.
class PackedKeys {
 public:
  static constexpr int kArrays = 2;
  static std::int64_t elements(const BlockArgs& args) { return 2 * PairRows::elements(kTileKeys, args.D); }

  PackedKeys(const BlockArgs& args, Scratch& scratch)
      : args_(args),
        key_(kTileKeys, args.D, scratch),
        value_pairs_(scratch.take<std::uint16_t>(PairRows::elements(kTileKeys, args.D))) {}

  // `value_rows` holds the tile's values until they are paired.
  void pack(std::int64_t b, std::int64_t kv_head, const Tile& keys, PairRows& value_rows) {
    whole_key_ = rows_at<const BFloat16>(args_.key, b, kv_head, keys.row);
    whole_value_ = rows_at<const BFloat16>(args_.value, b, kv_head, keys.row);
    special_ = copy_both(key_, whole_key_, value_rows, whole_value_, keys.count());
    is_worth_it_ = are_few(special_, keys.count());
    if (!is_worth_it_) return;
    pair_kernels().pair_rows(value_rows.row(0), padded(args_.D), value_pairs_, even(keys.count()), padded(args_.D));
  }

  // Whether products of pairs are worth it: few keys are special.
  bool is_worth_it() const { return is_worth_it_; }

  const std::vector<std::int32_t>& special() const { return special_; }
  const std::uint16_t* key(std::int64_t row) const { return key_.row(row); }
  const std::uint16_t* value_pairs(std::int64_t row) const { return value_pairs_ + row * padded(args_.D); }
  const BFloat16* whole_key(std::int64_t row) const { return whole_key_.row(row); }
  const BFloat16* whole_value(std::int64_t row) const { return whole_value_.row(row); }

 private:
  const BlockArgs& args_;
  PairRows key_;
  std::uint16_t* value_pairs_;
  RowSpan<const BFloat16> whole_key_{}, whole_value_{};
  std::vector<std::int32_t> special_;
  bool is_worth_it_ = false;
};

}  // namespace ringattn::cpu
