// What dense softmax makes of infinities and NaN, and that none of it reaches rows that may not see it; empty rows;
// merging; what calls must not touch.
#pragma once

#include "block.h"
#include "check.h"
#include "reference.h"

namespace ringattn::test {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

inline Shape causal_shape(DType dtype, std::int32_t length) {
  Shape shape{.dtype = dtype,
              .D = 40,
              .query_segments = {{{0, 1, length}}, 1},
              .key_segments = {{{0, 1, length}}, 1},
              .mask = {.key_count = length, .right = 0}};
  shape.scale = 0.2;
  return shape;
}

inline bool row_is(const Tensor& tensor, std::int64_t s, const Tensor& same, bool expected_nan) {
  bool ok = true;
  for (std::int64_t d = 0; d < tensor.D; ++d) {
    const double x = tensor.at(0, 0, s, d), y = same.at(0, 0, s, d);
    ok &= expected_nan ? std::isnan(x) : std::abs(x - y) <= 1e-4 + 1e-2 * std::abs(y);
  }
  return ok;
}

// A bad key is seen by the queries from its position on, a bad query row sees the keys up to its position.
inline void check_containment(DType dtype, double bad, std::uint64_t seed) {
  constexpr std::int32_t length = 150, position = 83;
  Block clean(causal_shape(dtype, length), seed), dirty(causal_shape(dtype, length), seed);
  clean.forward();
  clean.backward();
  for (std::int64_t d = 0; d < 40; ++d) {
    dirty.key.set(0, 0, position, d, bad);
    dirty.value.set(0, 0, position, d, bad);
  }
  dirty.forward();
  for (std::int64_t s = 0; s < position; ++s) CHECK(row_is(dirty.out, s, clean.out, false));
  if (std::isnan(bad)) {
    for (std::int64_t s = position; s < length; ++s) CHECK(row_is(dirty.out, s, clean.out, true));
  }
  dirty.backward();
  for (std::int64_t s = 0; s < position; ++s) CHECK(row_is(dirty.grad_query, s, clean.grad_query, false));
  for (std::int64_t s = position; s < length; ++s) CHECK(row_is(dirty.grad_query, s, clean.grad_query, true));

  Block bad_row(causal_shape(dtype, length), seed);
  for (std::int64_t d = 0; d < 40; ++d) {
    bad_row.query.set(0, 0, position, d, bad);
    bad_row.grad_out.set(0, 0, position, d, bad);
  }
  bad_row.forward();
  bad_row.backward();
  for (std::int64_t s = 0; s < length; ++s) {
    CHECK(row_is(bad_row.out, s, clean.out, s == position));
    CHECK(row_is(bad_row.grad_query, s, clean.grad_query, s == position));
    CHECK(row_is(bad_row.grad_key, s, clean.grad_key, s <= position));
    CHECK(row_is(bad_row.grad_value, s, clean.grad_value, s <= position));
  }
}

// Numbers below the smallest normal one keep their value: the first query sees one key alone, the last key one query.
inline void check_tiny_numbers(DType dtype, std::uint64_t seed) {
  for (const std::int32_t length : {1, 70, 150}) {
    Block block(causal_shape(dtype, length), seed);
    const double tiny = dtype == DType::float16 ? 3e-6 : 3e-39;  // exactly representable: a few units of the last place
    for (std::int64_t d = 0; d < 40; ++d) {
      block.value.set(0, 0, 0, d, tiny);
      block.grad_out.set(0, 0, length - 1, d, tiny);
    }
    block.forward();
    block.backward();
    const double p = std::exp(0.2 * [&] {
      double sum = 0;
      for (std::int64_t d = 0; d < 40; ++d) {
        sum += block.query.at(0, 0, length - 1, d) * block.key.at(0, 0, length - 1, d);
      }
      return sum;
    }() - block.lse.at(0, 0, length - 1, 0));
    for (std::int64_t d = 0; d < 40; ++d) {
      CHECK(block.out.at(0, 0, 0, d) == block.value.at(0, 0, 0, d));
      const double expected = p * block.grad_out.at(0, 0, length - 1, d);
      CHECK(std::abs(block.grad_value.at(0, 0, length - 1, d) - expected) <= 1e-2 * expected + 3e-45);
    }
  }
}

// Scores of -inf weigh nothing beside finite ones, before or after them; alone they give NaN.
inline void check_infinite_scores(DType dtype, std::uint64_t seed) {
  Shape shape{.dtype = dtype,
              .D = 1,
              .query_segments = {{{0, 1, 70}}, 1},
              .key_segments = {{{0, 1, 200}}, 1},
              .mask = {.key_count = 200}};
  for (const auto& [first, end] : {std::pair{0, 130}, std::pair{70, 200}, std::pair{0, 200}, std::pair{3, 5}}) {
    Block block(shape, seed);
    block.query.fill(1.0);
    for (std::int64_t s = first; s < end; ++s) block.key.set(0, 0, s, 0, -kInfinity);
    block.forward();
    const Reference expected = dense_attention(block.query, block.key, block.value, nullptr, nullptr,
                                               shape.query_segments, shape.key_segments, shape.mask, shape.scale);
    for (std::int64_t s = 0; s < 70; ++s) {
      const double out = block.out.at(0, 0, s, 0), lse = block.lse.at(0, 0, s, 0);
      CHECK(end - first == 200 ? std::isnan(out) && std::isnan(lse)
                               : std::abs(out - expected.out[s]) < 1e-2 && std::abs(lse - expected.lse[s]) < 1e-4);
    }
  }
}

// Scores near the largest float, and a scale as small: what is masked still weighs nothing.
inline void check_smallest_scale(DType dtype, std::uint64_t seed) {
  for (const std::int32_t length : {3, 150}) {
    Shape shape = causal_shape(dtype, length);
    shape.scale = 1e-37;
    Block block(shape, seed);
    for (Tensor* tensor : {&block.query, &block.key}) {
      for (std::int64_t s = 0; s < length; ++s) {
        for (std::int64_t d = 0; d < 40; ++d) tensor->set(0, 0, s, d, 1e18 * tensor->at(0, 0, s, d));
      }
    }
    block.forward();
    const Reference expected = dense_attention(block.query, block.key, block.value, nullptr, nullptr,
                                               shape.query_segments, shape.key_segments, shape.mask, shape.scale);
    const double tolerance = dtype == DType::bfloat16 ? 1e-2 : 1e-4;
    CHECK(relative_error(block.out, expected.out) < tolerance);
    for (std::int64_t s = 0; s < length; ++s) {
      CHECK(std::abs(block.lse.at(0, 0, s, 0) - expected.lse[static_cast<std::size_t>(s)]) < 1e-4);
    }
  }
}

// A NaN among scores of -inf stays, although numbers follow: few queries and many have kernels of their own.
inline void check_nan_before_numbers(DType dtype, std::uint64_t seed) {
  for (const std::int32_t queries : {3, 70}) {
    Shape shape{.dtype = dtype,
                .D = 1,
                .query_segments = {{{0, 1, queries}}, 1},
                .key_segments = {{{0, 1, 200}}, 1},
                .mask = {.key_count = 200}};
    Block block(shape, seed);
    block.query.fill(1.0);
    for (std::int64_t s = 0; s < 64; ++s) block.key.set(0, 0, s, 0, s == 5 ? kNaN : -kInfinity);
    block.forward();
    for (std::int64_t s = 0; s < queries; ++s) {
      CHECK(std::isnan(block.out.at(0, 0, s, 0)) && std::isnan(block.lse.at(0, 0, s, 0)));
    }
  }
}

// Masked scores would dominate, were they taken for 0; and large ones overflow, were they not shifted.
inline void check_extreme_scores(DType dtype, std::uint64_t seed) {
  for (const double score : {-60.0, -2e4, 3e4}) {
    for (const std::int32_t keys : {1, 63, 65}) {
      Shape shape{.dtype = dtype,
                  .D = 8,
                  .query_segments = {{{0, 1, 66}}, 1},
                  .key_segments = {{{0, 1, keys}}, 1},
                  .mask = {.key_count = keys}};
      Block block(shape, seed);
      block.query.fill(1.0);
      block.key.fill(score / 8);
      block.forward();
      const Reference expected = dense_attention(block.query, block.key, block.value, nullptr, nullptr,
                                                 shape.query_segments, shape.key_segments, shape.mask, shape.scale);
      CHECK(relative_error(block.out, expected.out) < 5e-3);
      CHECK(relative_error(block.lse, expected.lse) < 1e-6);
      block.backward();  // zeros that fill up a tile have scores far above these
      for (std::int64_t i = 0; i < 66; ++i) CHECK(std::isfinite(block.grad_query.at(0, 0, i, 0)));
    }
  }
}

inline bool is_empty_state(const Block& block) {
  bool ok = true;
  block.m.for_each([&](auto b, auto h, auto s, auto) {
    ok &= block.m.at(b, h, s, 0) == -kInfinity && block.l.at(b, h, s, 0) == 0.0;
  });
  block.o.for_each([&](auto b, auto h, auto s, auto d) { ok &= block.o.at(b, h, s, d) == 0.0; });
  return ok;
}

inline void check_nothing_visible(DType dtype, std::uint64_t seed) {
  Shape shape = causal_shape(dtype, 70);
  shape.key_segments.items[0].start = 500;
  shape.mask.key_count = 1000;
  Block block(shape, seed);
  block.forward();
  CHECK(is_empty_state(block));
  block.out.for_each([&](auto b, auto h, auto s, auto d) { CHECK(block.out.at(b, h, s, d) == 0.0); });
  for (std::int64_t s = 0; s < 70; ++s) CHECK(block.lse.at(0, 0, s, 0) == -kInfinity);
  block.backward();
  for (const Tensor* gradient : {&block.grad_query, &block.grad_key, &block.grad_value}) {
    gradient->for_each([&](auto b, auto h, auto s, auto d) { CHECK(gradient->at(b, h, s, d) == 0.0); });
  }

  // A call that sees nothing leaves the state it was given, whatever it holds.
  Block untouched(shape, seed);
  BlockArgs args = untouched.args();
  args.load_state = args.store_state = true;
  cpu::kernels().forward(args, serial());
  CHECK(std::isnan(untouched.o.at(0, 0, 0, 0)) && std::isnan(untouched.m.at(0, 0, 0, 0)));
}

inline void merge(Block& into, const Block& other) {
  BlockArgs args = into.args();
  args.other_o = other.o.rows.data, args.other_m = other.m.rows.data, args.other_l = other.l.rows.data;
  cpu::kernels().merge(args, serial());
}

inline void check_merge(DType dtype, std::uint64_t seed) {
  Shape shape{.dtype = dtype,
              .Hq = 2,
              .D = 40,
              .query_segments = {{{0, 1, 300}}, 1},
              .key_segments = {{{0, 1, 128}}, 1},
              .mask = {.key_count = 256}};
  Shape empty_shape = shape;
  empty_shape.key_segments = {};
  Block first(shape, seed), second(shape, seed + 1), empty(empty_shape, seed), result(empty_shape, seed);
  second.query.bytes = first.query.bytes;
  for (Block* block : {&first, &second, &empty, &result}) block->forward();
  merge(result, empty);
  CHECK(is_empty_state(result));
  merge(result, first);
  CHECK(same_bits(result.o, first.o) && same_bits(result.m, first.m) && same_bits(result.l, first.l));
  merge(result, empty);
  CHECK(same_bits(result.o, first.o) && same_bits(result.m, first.m) && same_bits(result.l, first.l));
  merge(result, second);
  Block reversed(shape, seed);
  reversed.o.bytes = second.o.bytes, reversed.m.bytes = second.m.bytes, reversed.l.bytes = second.l.bytes;
  merge(reversed, first);
  CHECK(same_bits(result.m, reversed.m));

  // One call over both: absorb second's keys after first's.
  BlockArgs args = second.args();
  args.o = first.o.rows.data, args.m = first.m.rows.data, args.l = first.l.rows.data;
  args.load_state = args.store_state = true;
  cpu::kernels().forward(args, serial());
  for (const Block* block : {&result, &reversed}) {
    double error = 0.0, size = 0.0;
    first.o.for_each([&](auto b, auto h, auto s, auto d) {
      const double l = first.l.at(b, h, s, 0), x = first.o.at(b, h, s, d) / l;
      error += std::pow(block->o.at(b, h, s, d) / block->l.at(b, h, s, 0) - x, 2);
      size += x * x;
    });
    CHECK(std::sqrt(error / size) < (size_of(dtype) == 2 ? 1e-2 : 1e-6));
  }
}

// Gradients that are not wanted are not written, and change no other; a second call adds.
inline void check_gradient_choices(DType dtype, std::uint64_t seed) {
  Block all(causal_shape(dtype, 140), seed);
  all.forward();
  all.backward();
  for (int wanted = 0; wanted < 8; ++wanted) {
    Block some(causal_shape(dtype, 140), seed);
    some.forward();
    cpu::kernels().delta(some.args(), serial());
    BlockArgs args = some.args();
    if (!(wanted & 1)) args.grad_query.data = nullptr;
    if (!(wanted & 2)) args.grad_key.data = nullptr;
    if (!(wanted & 4)) args.grad_value.data = nullptr;
    cpu::kernels().backward(args, serial());
    if (wanted & 1) CHECK(same_bits(some.grad_query, all.grad_query));
    if (wanted & 2) CHECK(same_bits(some.grad_key, all.grad_key));
    if (wanted & 4) CHECK(same_bits(some.grad_value, all.grad_value));
    cpu::kernels().backward(args, serial());
    if (wanted & 1) CHECK(some.grad_query.at(0, 0, 77, 3) == 2 * all.grad_query.at(0, 0, 77, 3));
    if (wanted & 2) CHECK(some.grad_key.at(0, 0, 77, 3) == 2 * all.grad_key.at(0, 0, 77, 3));
  }
}

inline void run_corner_cases(std::uint64_t seed) {
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16, DType::float16}) {
    current_case = "corner cases, type " + std::to_string(static_cast<int>(dtype)) + " seed " + std::to_string(seed);
    check_containment(dtype, kNaN, seed);
    check_containment(dtype, kInfinity, seed);
    check_infinite_scores(dtype, seed);
    check_nan_before_numbers(dtype, seed);
    check_extreme_scores(dtype, seed);
    check_tiny_numbers(dtype, seed);
    if (dtype != DType::float16) check_smallest_scale(dtype, seed);
    check_nothing_visible(dtype, seed);
    check_merge(dtype, seed);
    check_gradient_choices(dtype, seed);
  }
}

}  // namespace ringattn::test
