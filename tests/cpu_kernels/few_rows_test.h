// Calls with few queries, which have a kernel of their own: random ones against the reference; the same bits for any
// threads, any order of tasks and any cut; and what must not reach a row.
#pragma once

#include <algorithm>
#include <numeric>

#include "block.h"
#include "check.h"
#include "corner_cases.h"
#include "reference.h"

namespace ringattn::test {

// Runs the tasks in an order of its own, on one thread.
inline Launch shuffled(std::uint64_t seed) {
  return {[seed](std::int64_t tasks, const std::function<void(std::int64_t)>& task) {
            std::vector<std::int64_t> order(static_cast<std::size_t>(tasks));
            std::iota(order.begin(), order.end(), 0);
            std::mt19937_64 random(seed);
            std::shuffle(order.begin(), order.end(), random);
            if (seed % 2 == 0) std::sort(order.rbegin(), order.rend());
            for (const std::int64_t t : order) task(t);
          },
          nullptr};
}

// Forward in two calls, the second of which carries the state of the first on.
inline void forward_in_two(Block& block, std::int32_t cut, const Launch& launch) {
  BlockArgs args = block.args();
  args.store_state = true;
  args.key_segments = first_of(block.shape.key_segments, cut);
  args.Skv = cut;
  cpu::kernels().forward(args, launch);
  args = block.args();
  args.load_state = args.store_state = args.finalize = true;
  args.key_segments = rest_of(block.shape.key_segments, cut);
  args.Skv -= cut;
  for (Rows* rows : {&args.key, &args.value}) {
    rows->data = static_cast<std::byte*>(rows->data) +
                 static_cast<std::size_t>(cut * rows->token_stride) * size_of(block.shape.dtype);
  }
  cpu::kernels().forward(args, launch);
}

inline bool same_results(const Block& a, const Block& b) {
  return same_bits(a.o, b.o) && same_bits(a.m, b.m) && same_bits(a.l, b.l) && same_bits(a.out, b.out) &&
         same_bits(a.lse, b.lse);
}

inline Shape random_few_rows(DType dtype, std::mt19937_64& random) {
  static const std::int32_t bounds[] = {0, 10, 10, 64, 133, 400, 900, 901, 1500, 3000};
  const auto below = [&](std::uint64_t count) { return static_cast<std::int32_t>(random() % count); };
  Shape shape;
  shape.dtype = dtype;
  shape.B = 1 + below(2), shape.Hkv = 1 + below(2);
  shape.Hq = shape.Hkv << below(4);
  const std::int64_t head_dims[] = {1, 8, 32, 40, 64, 80, 96, 128, 256};
  shape.D = head_dims[below(9)];
  shape.scale = 1.0 / std::sqrt(static_cast<double>(shape.D));
  shape.memory = static_cast<Memory>(below(4));
  const std::int32_t rows = 1 + below(17), keys = below(3) == 0 ? 1 + below(1500) : 1 + below(300);
  const std::int32_t stride = 1 + below(3), query_stride = below(2) == 0 ? stride : 1 + below(3);
  const std::int32_t first = below(keys + 20);
  shape.query_segments = {{{first, query_stride, rows}}, 1};
  shape.key_segments = {{{below(50), stride, keys}}, 1};
  if (rows > 1 && below(3) == 0) {
    shape.query_segments = {{{first, 1, rows / 2}, {first + rows + below(200), 1, rows - rows / 2}}, 2};
  }
  if (keys > 1 && below(3) == 0) {
    shape.key_segments = {{{below(50), 1, keys / 2}, {50 + keys + below(200), 1, keys - keys / 2}}, 2};
  }
  shape.mask.key_count = 50 + 3 * keys + 300;
  if (below(2) == 0) shape.mask.right = 0;
  if (below(4) == 0) shape.mask.left = below(200), shape.mask.right = below(20);
  if (below(4) == 0) {
    shape.mask.document_bounds = bounds, shape.mask.document_count = 9;
    shape.mask.key_count = 3000;
  }
  return shape;
}

inline void check_few_rows(const Shape& shape, std::uint64_t seed, std::mt19937_64& random) {
  Block block(shape, seed);
  block.forward();
  const Reference expected = dense_attention(block.query, block.key, block.value, nullptr, nullptr,
                                             shape.query_segments, shape.key_segments, shape.mask, shape.scale);
  // With D = 1 and one row, what out is rounded to is all there is.
  const double tolerance = shape.dtype == DType::float64   ? 1e-13
                           : shape.dtype == DType::float32 ? 5e-6
                           : shape.dtype == DType::float16 ? 1e-3
                                                           : 8e-3;
  CHECK(relative_error(block.out, expected.out) < tolerance);
  CHECK(relative_error(block.lse, expected.lse, &expected.lse_terms) < (shape.dtype == DType::float64 ? 1e-13 : 5e-6));

  for (const Launch& launch : {threads(3), shuffled(random() | 1), shuffled(0)}) {
    Block other(shape, seed);
    other.forward(launch);
    CHECK(same_results(other, block));
  }
  const std::int32_t tile = cpu::kernels().key_tile(shape.dtype, shape.D);
  std::int32_t before = 0;
  for (const Segment& segment : shape.key_segments) {
    const std::int32_t tiles = segment.length / tile;
    for (int i = 0; i < 3; ++i) {
      Block parts(shape, seed);
      forward_in_two(parts, before + tile * static_cast<std::int32_t>(random() % (tiles + 1)), threads(1 + i));
      CHECK(same_results(parts, block));
    }
    before += segment.length;
  }
}

// What a query sees alone decides: bad keys behind it, and bad queries beside it, change no bit of it. Only bfloat16
// then goes without products of pairs.
inline void check_few_rows_containment(DType dtype, double bad, std::uint64_t seed) {
  for (const std::int32_t rows : {2, 6, 16}) {
    for (const std::int32_t position : {105, 110, 126, 127, 128, 131}) {
      Shape shape = causal_shape(dtype, 200);
      shape.D = 64, shape.Hq = 2;
      shape.query_segments = {{{120, 1, rows}}, 1};
      Block clean(shape, seed), bad_key(shape, seed), bad_query(shape, seed);
      clean.forward();
      for (std::int64_t d = 0; d < shape.D; ++d) {
        bad_key.key.set(0, 0, position, d, bad);
        bad_key.value.set(0, 0, position, d, bad);
        bad_query.query.set(0, 0, rows - 1, d, bad);
      }
      bad_key.forward();
      bad_query.forward();
      const Reference expected = dense_attention(bad_key.query, bad_key.key, bad_key.value, nullptr, nullptr,
                                                 shape.query_segments, shape.key_segments, shape.mask, shape.scale);
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t d = 0; d < shape.D; ++d) {
          const double x = clean.out.at(0, 1, i, d), y = bad_key.out.at(0, 1, i, d);
          if (position > 120 + i) {
            CHECK(x == y);
          } else {
            CHECK(std::isnan(expected.out[(rows + i) * shape.D + d]) == std::isnan(y));
            CHECK(!std::isnan(bad) || std::isnan(y));
          }
          const double beside = bad_query.out.at(0, 0, i, d), alone = clean.out.at(0, 0, i, d);
          CHECK(i == rows - 1              ? std::isnan(beside)
                : dtype == DType::bfloat16 ? std::abs(beside - alone) < 2e-2
                                           : beside == alone);
        }
      }
    }
  }
}

// A row alone has the bits that it has among others. Products of bfloat16 pairs may be taken for several rows alone.
inline void check_few_rows_apart(DType dtype, std::uint64_t seed) {
  Shape shape = causal_shape(dtype, 300);
  shape.D = 64;
  shape.query_segments = {{{190, 1, 7}}, 1};
  Block together(shape, seed);
  together.forward();
  Block apart(shape, seed);
  for (std::int32_t i = 0; i < 7; ++i) {
    const std::size_t size = size_of(dtype), wide = size_of(apart.A);
    BlockArgs args = apart.args();
    const auto skip = [&](auto* data, std::size_t bytes) { return static_cast<std::byte*>(data) + bytes; };
    args.Sq = 1, args.query_segments = {{{190 + i, 1, 1}}, 1};
    args.query.data = skip(args.query.data, i * shape.D * size),
    args.out.data = skip(args.out.data, i * shape.D * size);
    args.o = skip(args.o, i * shape.D * wide);
    args.m = skip(args.m, i * wide), args.l = skip(args.l, i * wide), args.lse = skip(args.lse, i * wide);
    args.store_state = args.finalize = true;
    cpu::kernels().forward(args, serial());
  }
  CHECK(same_results(apart, together));
}

inline void check_few_rows_numbers(DType dtype, std::uint64_t seed) {
  for (const std::int32_t rows : {1, 2, 5, 16}) {
    Shape shape{.dtype = dtype,
                .D = 64,
                .query_segments = {{{200, 1, rows}}, 1},
                .key_segments = {{{0, 1, 200}}, 1},
                .mask = {.key_count = 500, .right = 0}};
    Block tiny(shape, seed);  // values below the smallest normal number keep their size
    const double value = dtype == DType::float16 ? 3e-6 : 3e-39;
    tiny.value.fill(value);
    tiny.forward();
    tiny.out.for_each(
        [&](auto b, auto h, auto s, auto d) { CHECK(std::abs(tiny.out.at(b, h, s, d) - value) <= 0.05 * value); });

    Block pairs(shape, seed);  // so do keys that meet large queries
    pairs.query.fill(dtype == DType::float16 ? 6e4 : 1e38);
    for (std::int64_t s = 0; s < 200; ++s) {
      for (std::int64_t d = 0; d < 64; ++d) {
        pairs.key.set(0, 0, s, d, dtype == DType::float16 ? (s % 7) * 1e-6 : (s % 7) * 3e-40);
      }
    }
    pairs.forward();
    const Reference expected = dense_attention(pairs.query, pairs.key, pairs.value, nullptr, nullptr,
                                               shape.query_segments, shape.key_segments, shape.mask, shape.scale);
    CHECK(relative_error(pairs.out, expected.out) < 5e-3 && relative_error(pairs.lse, expected.lse) < 1e-5);

    // Scores of -inf weigh nothing beside finite ones, before or after them; alone they give NaN.
    for (const auto& [first, end] : {std::pair{0, 130}, std::pair{70, 200}, std::pair{0, 200}, std::pair{3, 5}}) {
      Block infinite(shape, seed);
      infinite.query.fill(1.0);
      for (std::int64_t s = first; s < end; ++s) infinite.key.set(0, 0, s, 0, -kInfinity);
      infinite.forward();
      const Reference wanted = dense_attention(infinite.query, infinite.key, infinite.value, nullptr, nullptr,
                                               shape.query_segments, shape.key_segments, shape.mask, shape.scale);
      for (std::int64_t s = 0; s < rows; ++s) {
        const double out = infinite.out.at(0, 0, s, 0), lse = infinite.lse.at(0, 0, s, 0);
        CHECK(end - first == 200 ? std::isnan(out) && std::isnan(lse)
                                 : std::abs(out - wanted.out[s * 64]) < 2e-2 && std::abs(lse - wanted.lse[s]) < 1e-4);
      }
    }

    shape.key_segments.items[0].start = 300;  // no query sees a key
    Block nothing(shape, seed);
    nothing.forward(threads(2));
    CHECK(is_empty_state(nothing));
    nothing.out.for_each([&](auto b, auto h, auto s, auto d) { CHECK(nothing.out.at(b, h, s, d) == 0.0); });
    for (std::int64_t s = 0; s < rows; ++s) CHECK(nothing.lse.at(0, 0, s, 0) == -kInfinity);
  }
}

inline void run_few_rows_tests(std::uint64_t seed, int cases) {
  std::mt19937_64 random(seed);
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16, DType::float16}) {
    const std::string name = "few rows, type " + std::to_string(static_cast<int>(dtype)) + " seed ";
    current_case = name + std::to_string(seed);
    check_few_rows_containment(dtype, kNaN, seed);
    check_few_rows_containment(dtype, kInfinity, seed);
    check_few_rows_numbers(dtype, seed);
    if (dtype != DType::bfloat16) check_few_rows_apart(dtype, seed);
    for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(cases); ++i) {
      const Shape shape = random_few_rows(dtype, random);
      current_case = name + std::to_string(seed) + " case " + std::to_string(i);
      check_few_rows(shape, seed + i, random);
    }
  }
}

}  // namespace ringattn::test
