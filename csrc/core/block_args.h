// What every block kernel takes: one plain struct for forward, backward and the small kernels on every device, so that
// a test, a C++ benchmark, an emulator and torch all call the same thing.
//
// Shapes: query [B, Hq, Sq, D]; key, value [B, Hkv, Skv, D]; Hq is a multiple of Hkv. T is the input type, A the
// accumulation type (double for float64 inputs, else float).
//
// The state of a query row is (o, m, l): the unnormalised output, the reference maximum of the raw scores q.k, and the
// sum of exp(scale * (q.k - m)). The empty state is (0, -inf, 0).
#pragma once

#include <cstdint>

#include "core/mask.h"
#include "core/segment.h"

namespace ringattn {

enum class DType : std::int32_t { float64, float32, bfloat16, float16 };

// [B, H, S, D] with a last stride of 1; strides in elements.
struct Rows {
  void* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t token_stride = 0;
};

struct BlockArgs {
  DType dtype = DType::float32;
  std::int64_t B = 0, Hq = 0, Hkv = 0, Sq = 0, Skv = 0, D = 0;
  double scale = 1.0;  // > 0

  Segments query_segments;  // lengths sum to Sq
  Segments key_segments;    // lengths sum to Skv
  Mask mask;

  Rows query, key, value;  // T

  // The carried state, contiguous: o [B, Hq, Sq, D], m and l [B, Hq, Sq], in A.
  void* o = nullptr;
  void* m = nullptr;
  void* l = nullptr;
  bool load_state = false;   // start from (o, m, l); otherwise from the empty state, without reading them
  bool store_state = false;  // leave the new state in (o, m, l)
  bool finalize = false;     // write out = o / l and lse = scale * m + ln l

  Rows out;             // T
  void* lse = nullptr;  // A, [B, Hq, Sq] contiguous; written by a finalizing forward, read by backward

  // Backward. delta = rowsum(grad_out * out) - grad_lse, [B, Hq, Sq] contiguous in A.
  Rows grad_out;                   // T
  const void* grad_lse = nullptr;  // A, [B, Hq, Sq] contiguous; or null: zero. Read by the delta kernel alone
  void* delta = nullptr;
  // What backward reads on GPUs, written there by the delta kernel; float, as delta. A row that saw nothing has -inf.
  void* minus_lse_log2 = nullptr;  // -lse * log2(e)
  void* minus_delta = nullptr;
  // Accumulators in A that backward adds to; a null data pointer means the gradient is not wanted.
  Rows grad_query, grad_key, grad_value;  // the cast of GPUs reads grad_query and writes it, rounded to T, into out
  bool deterministic = true;

  // merge: the state that is merged into (o, m, l), laid out like it.
  const void* other_o = nullptr;
  const void* other_m = nullptr;
  const void* other_l = nullptr;
};

}  // namespace ringattn
