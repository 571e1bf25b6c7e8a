// What a launch hands to a kernel of csrc/cuda: the arguments of the block, and what the host derives from them once.
#pragma once

#include <cstdint>

#include "core/block_args.h"

namespace ringattn::cuda {

struct Params {
  BlockArgs block;
  float scale_log2 = 0, minus_scale_log2 = 0;  // scale * log2(e): exponentials are in base 2
  std::int32_t group = 1;                      // query heads that share a key head
  std::int32_t query_tiles = 0, key_tiles = 0;
  bool aligned = true;        // rows of query, key, value, out and grad_out start at multiples of 16 bytes
  bool fills_columns = true;  // and are as long as those of the compiled tile
};

}  // namespace ringattn::cuda
