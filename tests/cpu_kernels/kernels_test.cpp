// The block kernels against a dense reference, over types, head dimensions, masks, layouts and memory layouts; and what
// they promise bit for bit: carried splits, threads, finalize.
#include <cinttypes>
#include <type_traits>

#include "block.h"
#include "check.h"
#include "corner_cases.h"
#include "micro_test.h"
#include "reference.h"

namespace ringattn::test {
namespace {

struct Tolerance {
  double out, gradient;
};

Tolerance tolerance_of(DType dtype) {
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

void check_against_reference(const Shape& shape, std::uint64_t seed) {
  Block block(shape, seed);
  block.forward(threads(2));
  block.backward(threads(3));
  const Reference expected = dense_attention(block.query, block.key, block.value, &block.grad_out, &block.grad_lse,
                                             shape.query_segments, shape.key_segments, shape.mask, shape.scale);
  const Tolerance tolerance = tolerance_of(shape.dtype);
  CHECK(relative_error(block.out, expected.out) < tolerance.out);
  CHECK(relative_error(block.lse, expected.lse, &expected.lse_terms) < tolerance_of(block.A).out);
  CHECK(relative_error(block.grad_query, expected.grad_query, &expected.grad_query_terms) < tolerance.gradient);
  CHECK(relative_error(block.grad_key, expected.grad_key, &expected.grad_key_terms) < tolerance.gradient);
  CHECK(relative_error(block.grad_value, expected.grad_value, &expected.grad_value_terms) < tolerance.gradient);

  Block again(shape, seed);
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

Segments first_of(const Segments& segments, std::int32_t count) {
  Segments result;
  for (const Segment& segment : segments) {
    const std::int32_t taken = std::min(segment.length, count);
    if (taken > 0) result.items[result.count++] = segment.part(0, taken);
    count -= taken;
  }
  return result;
}

Segments rest_of(const Segments& segments, std::int32_t count) {
  Segments result;
  for (const Segment& segment : segments) {
    const std::int32_t dropped = std::min(segment.length, count);
    if (dropped < segment.length) result.items[result.count++] = segment.part(dropped, segment.length - dropped);
    count -= dropped;
  }
  return result;
}

// A pass cut into two calls on a tile boundary gives the bits of one.
void check_split(const Shape& shape, std::uint64_t seed) {
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
      const std::size_t skipped = static_cast<std::size_t>(cut * parts.key.rows.token_stride) * size_of(shape.dtype);
      args.key.data = static_cast<std::byte*>(args.key.data) + skipped;
      args.value.data = static_cast<std::byte*>(args.value.data) + skipped;
      cpu::kernels().forward(args, serial());
      CHECK(same_bits(parts.o, whole.o) && same_bits(parts.m, whole.m) && same_bits(parts.l, whole.l));
      CHECK(same_bits(parts.out, whole.out) && same_bits(parts.lse, whole.lse));
    }
    before += segment.length;
  }
}

// Many heads at once give the bits of each head alone, although tasks then take several query tiles together.
void check_many_heads(DType dtype, const Mask& mask, std::uint64_t seed) {
  Shape shape;
  shape.dtype = dtype;
  shape.Hq = 32, shape.Hkv = 8, shape.D = 8;
  shape.query_segments = shape.key_segments = {{{0, 1, 270}, {300, 1, 265}}, 2};
  shape.mask = mask;
  shape.memory = Memory::transposed;
  Block block(shape, seed);
  block.forward(threads(3));
  block.backward(threads(3));
  Block alone(shape, seed);
  const std::int64_t size = static_cast<std::int64_t>(size_of(dtype)),
                     wide = static_cast<std::int64_t>(size_of(block.A));
  const auto move = [](auto*& data, std::int64_t bytes) {
    data = reinterpret_cast<std::remove_reference_t<decltype(data)>>(reinterpret_cast<std::uintptr_t>(data) + bytes);
  };
  for (std::int64_t h = 0; h < shape.Hkv; ++h) {
    BlockArgs args = alone.args();
    args.Hq /= args.Hkv, args.Hkv = 1;
    for (Rows* rows : {&args.key, &args.value}) move(rows->data, h * rows->head_stride * size);
    for (Rows* rows : {&args.grad_key, &args.grad_value}) move(rows->data, h * rows->head_stride * wide);
    for (Rows* rows : {&args.query, &args.out, &args.grad_out}) move(rows->data, h * 4 * rows->head_stride * size);
    move(args.grad_query.data, h * 4 * args.grad_query.head_stride * wide);
    for (void** rows : {&args.m, &args.l, &args.lse, &args.delta}) move(*rows, h * 4 * args.Sq * wide);
    move(args.grad_lse, h * 4 * args.Sq * wide);
    move(args.o, h * 4 * args.Sq * args.D * wide);
    args.store_state = args.finalize = true;
    cpu::kernels().forward(args, serial());
    cpu::kernels().delta(args, serial());
    cpu::kernels().backward(args, serial());
  }
  CHECK(same_bits(block.out, alone.out) && same_bits(block.lse, alone.lse) && same_bits(block.o, alone.o));
  CHECK(same_bits(block.grad_query, alone.grad_query) && same_bits(block.grad_key, alone.grad_key) &&
        same_bits(block.grad_value, alone.grad_value));
}

struct NamedSegments {
  const char* name;
  Segments queries, keys;
};

const NamedSegments kSegments[] = {
    {"contiguous", {{{100, 1, 150}}, 1}, {{{40, 1, 210}}, 1}},
    {"zigzag", {{{30, 1, 70}, {220, 1, 67}}, 2}, {{{0, 1, 130}, {190, 1, 100}}, 2}},
    {"strided", {{{2, 3, 97}}, 1}, {{{1, 3, 99}}, 1}},
    {"strides differ", {{{5, 2, 90}}, 1}, {{{3, 4, 74}}, 1}},
    {"one", {{{17, 1, 1}}, 1}, {{{16, 1, 1}}, 1}},
    {"no keys", {{{17, 1, 70}}, 1}, {{}, 0}},
    {"no queries", {{}, 0}, {{{3, 1, 70}}, 1}},
};

const std::int32_t kBounds[] = {0, 10, 10, 64, 133, 200, 300};

struct NamedMask {
  const char* name;
  Mask mask;
};

const NamedMask kMasks[] = {
    {"full", {.key_count = 300}},
    {"causal", {.key_count = 300, .right = 0}},
    {"window", {.key_count = 300, .left = 23, .right = 5}},
    {"documents", {.key_count = 300, .document_bounds = kBounds, .document_count = 6}},
    {"causal documents", {.key_count = 300, .right = 0, .document_bounds = kBounds, .document_count = 6}},
};

const char* const kTypes[] = {"float64", "float32", "bfloat16", "float16"};

void run_matrix(std::uint64_t seed) {
  const std::int64_t head_dims[] = {1, 8, 40, 64, 72, 128, 256};
  const Memory memories[] = {Memory::contiguous, Memory::transposed, Memory::gapped, Memory::expanded};
  int index = 0;
  for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16, DType::float16}) {
    for (Mask mask : {kMasks[1].mask, kMasks[2].mask}) {
      current_case = std::string(kTypes[static_cast<int>(dtype)]) + " many heads, seed " + std::to_string(seed);
      mask.key_count = 565;
      check_many_heads(dtype, mask, seed);
    }
    {  // more query tiles than backward takes in a round, more chunks of keys than tasks
      Shape shape{.dtype = dtype,
                  .D = 8,
                  .query_segments = {{{0, 1, 1101}}, 1},
                  .key_segments = {{{0, 1, 2200}}, 1},
                  .mask = {.key_count = 2200, .left = 700}};
      current_case = std::string(kTypes[static_cast<int>(dtype)]) + " long, seed " + std::to_string(seed);
      check_against_reference(shape, seed);
    }
    for (const std::int64_t D : head_dims) {
      for (const NamedSegments& segments : kSegments) {
        for (const NamedMask& mask : kMasks) {
          ++index;
          Shape shape{.dtype = dtype,
                      .D = D,
                      .query_segments = segments.queries,
                      .key_segments = segments.keys,
                      .mask = mask.mask,
                      .memory = memories[index % 4],
                      .grad_memory = memories[index / 4 % 4]};
          shape.scale = 1.0 / std::sqrt(static_cast<double>(D));
          // Wide heads are slow in the reference; narrow ones take the batches and the groups.
          if (D <= 40) {
            shape.B = 1 + index % 2, shape.Hq = 2 + index % 3, shape.Hkv = index % 3 == 1 ? 3 : shape.Hq / 2;
            if (shape.Hq % shape.Hkv != 0) shape.Hkv = 1;
          }
          current_case = std::string(kTypes[static_cast<int>(dtype)]) + " D=" + std::to_string(D) + " " +
                         segments.name + " " + mask.name + " memory " + std::to_string(index % 4) + " grad memory " +
                         std::to_string(index / 4 % 4) + " seed " + std::to_string(seed + index);
          check_against_reference(shape, seed + index);
          check_split(shape, seed + index);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ringattn::test

int main(int argc, char** argv) {
  using namespace ringattn::test;
  const std::uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : std::random_device{}();
  std::printf("seed %" PRIu64 "\n", seed);
  run_micro_tests(seed);
  run_corner_cases(seed);
  run_matrix(seed);
  std::printf(failures ? "%d checks failed\n" : "all checks passed\n", failures);
  return failures ? 1 : 0;
}
