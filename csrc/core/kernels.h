// The table through which the ring reaches the block kernels of a device.
#pragma once

#include <cstdint>
#include <functional>

#include "core/block_args.h"

namespace ringattn {

// Runs task(0) … task(count - 1), in any order and on any threads, and returns when all are done.
using ParallelFor = std::function<void(std::int64_t count, const std::function<void(std::int64_t)>& task)>;

// Where a kernel runs: the threads a CPU may use, or the stream of a GPU.
struct Launch {
  ParallelFor parallel;
  void* stream = nullptr;
};

struct KernelTable {
  // The tokens of a key tile in forward. A pass cut into calls on tile boundaries gives the bits of one call.
  std::int32_t (*key_tile)(DType dtype, std::int64_t head_dim);

  void (*forward)(const BlockArgs&, const Launch&);   // absorbs one block of keys and values into the state
  void (*finalize)(const BlockArgs&, const Launch&);  // (o, m, l) -> out, lse
  void (*merge)(const BlockArgs&, const Launch&);     // (o, m, l) absorbs (other_o, other_m, other_l)
  void (*delta)(const BlockArgs&, const Launch&);     // out, grad_out, grad_lse -> delta
  void (*backward)(const BlockArgs&, const Launch&);  // adds to grad_query, grad_key, grad_value
};

}  // namespace ringattn
