// What every call must fulfil: the dense reference, and bit for bit what does not depend on threads and cuts.
#pragma once

#include "block.h"
#include "check.h"
#include "reference.h"

namespace ringattn::test {

struct Tolerance {
  double out, gradient;
};

inline Tolerance tolerance_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return {1e-13, 1e-13};
    case DType::float32:
      return {5e-6, 2e-6};  // with all tokens equal the errors of a sum add up
    case DType::bfloat16:
      return {4e-3, 4e-3};
    default:
      return {5e-4, 5e-4};
  }
}

// Rows that saw nothing hold the empty state, whatever their neighbours saw.
inline bool unseen_rows_are_empty(const Block& block) {
  bool ok = true;
  block.l.for_each([&](auto b, auto h, auto s, auto) {
    if (block.l.at(b, h, s, 0) != 0.0) return;
    ok &= std::isinf(block.m.at(b, h, s, 0)) && block.m.at(b, h, s, 0) < 0;
    for (std::int64_t d = 0; d < block.o.D; ++d) ok &= block.o.at(b, h, s, d) == 0.0;
  });
  return ok;
}

inline void check_against_reference(const Shape& shape, std::uint64_t seed) {
  Block block(shape, seed);
  block.forward(threads(2));
  block.backward(threads(3));
  const Reference expected = dense_attention(block.query, block.key, block.value, &block.grad_out,
                                             shape.has_grad_lse ? &block.grad_lse : nullptr, shape.query_segments,
                                             shape.key_segments, shape.mask, shape.scale);
  Tolerance tolerance = tolerance_of(shape.dtype);
  const double rounding = block.A == DType::float64 ? 0x1p-52 : 0x1p-23;
  const bool all_equal =
      shape.key_memory == Memory::expanded || shape.memory == Memory::expanded || shape.grad_memory == Memory::expanded;
  if (all_equal) tolerance.out *= 2, tolerance.gradient += 200 * rounding;  // errors add up instead of cancelling
  tolerance.out += 4 * rounding * shape.largest_score * shape.scale;
  tolerance.gradient += 4 * rounding * shape.largest_score * shape.scale;
  const auto is_near = [&](const Tensor& actual, const std::vector<double>& numbers, const std::vector<double>& terms,
                           double limit) {
    return relative_error(actual, numbers, &terms, smallest_step(actual.dtype, shape.dtype)) < limit;
  };
  CHECK(is_near(block.out, expected.out, expected.out_terms, tolerance.out));
  CHECK(is_near(block.lse, expected.lse, expected.lse_terms, tolerance_of(block.A).out));
  CHECK(is_near(block.grad_query, expected.grad_query, expected.grad_query_terms, tolerance.gradient));
  CHECK(is_near(block.grad_key, expected.grad_key, expected.grad_key_terms, tolerance.gradient));
  CHECK(is_near(block.grad_value, expected.grad_value, expected.grad_value_terms, tolerance.gradient));
  CHECK(unseen_rows_are_empty(block));
  for (const Tensor* result : {&block.out, &block.grad_query, &block.grad_key, &block.grad_value}) {
    CHECK(result->gaps_are_nan());
  }

  Block again(shape, seed);
  CHECK(same_bits(block.query, again.query) && same_bits(block.key, again.key) && same_bits(block.value, again.value));
  again.forward();
  again.backward();
  CHECK(same_bits(block.out, again.out) && same_bits(block.lse, again.lse) && same_bits(block.o, again.o));
  CHECK(same_bits(block.grad_query, again.grad_query) && same_bits(block.grad_key, again.grad_key) &&
        same_bits(block.grad_value, again.grad_value));

  // The state that was stored finalizes to what the call wrote.
  Block finalized(shape, seed);
  BlockArgs args = finalized.args();
  args.o = block.o.rows.data, args.m = block.m.rows.data, args.l = block.l.rows.data;
  cpu::kernels().finalize(args, serial());
  CHECK(same_bits(block.out, finalized.out) && same_bits(block.lse, finalized.lse));
}

// A pass cut into two calls on a tile boundary gives the bits of one.
inline void check_split(const Shape& shape, std::uint64_t seed) {
  Block whole(shape, seed);
  whole.forward();
  const std::int32_t tile = cpu::kernels().key_tile(shape.dtype, shape.D);
  std::int32_t before = 0;
  for (const Segment& segment : shape.key_segments) {
    for (std::int32_t cut = before; cut <= before + segment.length; cut += tile) {
      Block parts(shape, seed);
      BlockArgs args = parts.args();
      args.store_state = true;
      args.key_segments = first_of(shape.key_segments, cut);
      args.Skv = cut;
      cpu::kernels().forward(args, serial());
      args = parts.args();
      args.load_state = args.store_state = args.finalize = true;
      args.key_segments = rest_of(shape.key_segments, cut);
      args.Skv -= cut;
      for (Rows* rows : {&args.key, &args.value}) {
        const std::size_t skipped = static_cast<std::size_t>(cut * rows->token_stride) * size_of(shape.dtype);
        rows->data = static_cast<std::byte*>(rows->data) + skipped;
      }
      cpu::kernels().forward(args, serial());
      CHECK(same_bits(parts.o, whole.o) && same_bits(parts.m, whole.m) && same_bits(parts.l, whole.l));
      CHECK(same_bits(parts.out, whole.out) && same_bits(parts.lse, whole.lse));
    }
    before += segment.length;
  }
}

}  // namespace ringattn::test
