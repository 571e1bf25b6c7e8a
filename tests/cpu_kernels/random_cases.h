// Cases drawn at random, so that every remainder of lengths and head dimensions meets every type, mask, layout and
// memory layout, and scores and rows that are out of the ordinary.
#pragma once

#include <algorithm>

#include "properties.h"

namespace ringattn::test {

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}

  std::int32_t below(std::int32_t end) {
    return static_cast<std::int32_t>(random_() % static_cast<std::uint64_t>(end));
  }
  bool one_in(std::int32_t count) { return below(count) == 0; }
  template <typename T>
  T of(std::initializer_list<T> choices) {
    return choices.begin()[below(static_cast<std::int32_t>(choices.size()))];
  }

 private:
  std::mt19937_64 random_;
};

inline Segments draw_segments(Draw& draw, std::int32_t length) {
  if (length == 0) return {};
  const std::int32_t start = draw.below(200), gap = draw.below(150), cut = draw.below(length);
  if (draw.one_in(3)) return {{{start, 1 + draw.below(4), length}}, 1};
  if (cut == 0 || draw.one_in(2)) return {{{start, 1, length}}, 1};
  return {{{start, 1, cut}, {start + cut + gap, 1, length - cut}}, 2};
}

// `bounds` keeps the documents, if there are any, for as long as the mask is used.
inline Mask draw_mask(Draw& draw, std::int32_t end, std::vector<std::int32_t>& bounds) {
  Mask mask{.key_count = end + draw.below(50)};
  if (draw.one_in(2)) mask.right = draw.of({0, 0, 5, draw.below(100)});
  if (draw.one_in(3)) mask.left = draw.below(100);
  if (draw.one_in(2)) return mask;
  bounds = {0, mask.key_count};
  for (std::int32_t i = draw.below(6); i > 0; --i) bounds.push_back(draw.below(mask.key_count));
  std::sort(bounds.begin(), bounds.end());
  mask.document_bounds = bounds.data(), mask.document_count = static_cast<std::int32_t>(bounds.size()) - 1;
  return mask;
}

// Some rows of an input become NaN, or so small that they have no exponent of their own, as a whole or in one element.
inline void make_special(Draw& draw, Tensor& tensor) {
  if (tensor.S == 0) return;
  const double tiny = tensor.dtype == DType::float64 ? 3e-310 : tensor.dtype == DType::float16 ? 3e-6 : 3e-39;
  const double number = draw.of({std::numeric_limits<double>::quiet_NaN(), tiny});
  const bool whole = draw.one_in(2);
  for (std::int32_t left = draw.of({1, 3, 8, 20}); left > 0; --left) {
    const std::int32_t b = draw.below(static_cast<std::int32_t>(tensor.B));
    const std::int32_t h = draw.below(static_cast<std::int32_t>(tensor.H));
    const std::int32_t s = draw.below(static_cast<std::int32_t>(tensor.S));
    const std::int32_t only = draw.below(static_cast<std::int32_t>(tensor.D));
    for (std::int32_t d = 0; d < tensor.D; ++d) {
      if (whole || d == only) tensor.set(b, h, s, d, number);
    }
  }
}

inline constexpr int kRandomCases = 64;  // as many as a tile has rows

// Of kRandomCases cases in turn every remainder of the number of query rows, of key rows and of D occurs; one in four
// has few query rows, as decoding has, and many keys.
inline Shape draw_shape(Draw& draw, DType dtype, int index, std::vector<std::int32_t>& bounds) {
  const bool decodes = index % 4 == 3;
  const std::int32_t query_rows = decodes      ? 1 + index / 4
                                  : index == 0 ? 64 * (1 + draw.below(2))
                                               : 16 + index - index / 4 + 64 * draw.below(3);
  const std::int32_t key_rows = index * 37 % 64 + 64 * draw.below(decodes ? 10 : 3);
  Shape shape;
  shape.dtype = dtype;
  shape.query_segments = draw_segments(draw, query_rows), shape.key_segments = draw_segments(draw, key_rows);
  const std::int64_t tails[] = {1, 8, 40, 64, 72, 80, 96, 128, 160, 256};
  shape.D = index % 2 ? 16 * draw.below(6) + index / 2 % 16 + 1 : tails[index / 2 % 10];
  if (shape.D <= 96) {
    shape.B = 1 + draw.below(2), shape.Hkv = 1 + draw.below(2);
    shape.Hq = shape.Hkv * (decodes ? draw.of({1, 4, 8}) : 1 + draw.below(3));
  }
  std::int32_t end = 1;
  for (const Segments& segments : {shape.query_segments, shape.key_segments}) {
    for (const Segment& segment : segments) end = std::max(end, segment.last() + 1);
  }
  shape.mask = draw_mask(draw, end, bounds);
  const auto memory = [&] {
    return draw.of({Memory::contiguous, Memory::transposed, Memory::gapped, Memory::expanded, Memory::shared});
  };
  shape.memory = memory(), shape.key_memory = memory(), shape.value_memory = memory(), shape.grad_memory = memory();
  shape.scale = 1.0 / std::sqrt(static_cast<double>(shape.D));
  shape.has_grad_lse = draw.one_in(2);

  const double ordinary = 1.0, huge = 100.0 / std::pow(static_cast<double>(shape.D), 0.25);
  const double deviation = draw.of({ordinary, ordinary, huge, dtype == DType::float16 ? 1e-4 : 1e-20});
  if (deviation == huge) shape.largest_score = 3e4 * std::sqrt(static_cast<double>(shape.D));
  const std::uint64_t seed = static_cast<std::uint64_t>(draw.below(1 << 30));
  shape.prepare = [deviation, seed](Block& block) {
    Draw draw(seed);
    for (Tensor* tensor : {&block.query, &block.key}) {
      std::mt19937_64 random(seed + (tensor == &block.key));
      if (deviation != 1.0) tensor->fill_normal(random, deviation);
    }
    for (Tensor* tensor : {&block.query, &block.key, &block.value, &block.grad_out}) {
      if (draw.one_in(8)) make_special(draw, *tensor);
    }
  };
  return shape;
}

// Fewer than kRandomCases are spread over them; of an odd number some decode.
inline void run_random_cases(std::uint64_t seed, int cases) {
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16, DType::float16}) {
    for (int i = 0; i < cases; ++i) {
      const int index = static_cast<int>((seed + static_cast<std::uint64_t>(i * kRandomCases / cases)) % kRandomCases);
      const std::uint64_t case_seed = seed + static_cast<std::uint64_t>(index);
      Draw draw(case_seed);
      std::vector<std::int32_t> bounds;
      const Shape shape = draw_shape(draw, dtype, index, bounds);
      current_case = "random case " + std::to_string(index) + ", type " + std::to_string(static_cast<int>(dtype)) +
                     ", D " + std::to_string(shape.D) + ", " + std::to_string(shape.query_segments.length()) +
                     " queries, " + std::to_string(shape.key_segments.length()) + " keys, seed " + std::to_string(seed);
      check_against_reference(shape, case_seed);
      if (index % 2 == 0) check_split(shape, case_seed);
    }
  }
}

}  // namespace ringattn::test
