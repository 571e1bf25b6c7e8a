// The block kernels against a dense reference, over types, head dimensions, masks, layouts and memory layouts; and what
// they promise bit for bit.
//
//   ringattn_cpu_tests [seed [cases]]
//
// With a number of random cases per type, 64 at most, the matrix of fixed ones is left out: for sanitizers and emulated
// CPUs. Ends with 2 if the machine lacks what RINGATTN_CPU asks for.
#include <cinttypes>
#include <cstdlib>
#include <stdexcept>
#include <type_traits>

#include "block.h"
#include "check.h"
#include "corner_cases.h"
#include "few_rows_test.h"
#include "micro_test.h"
#include "properties.h"
#include "random_cases.h"

// The tables that are built, as csrc/cpu/capability.cpp knows them.
namespace ringattn::cpu {
namespace generic {
extern const MicroTable table;
}
#if defined(RINGATTN_CPU_WITH_AVX2)
namespace avx2 {
extern const MicroTable table;
}
#endif
#if defined(RINGATTN_CPU_WITH_AVX512)
namespace avx512 {
extern const MicroTable table;
}
#endif
#if defined(RINGATTN_CPU_WITH_AVX512_BF16)
namespace avx512_bf16 {
extern const MicroTable table;
}
#endif
}  // namespace ringattn::cpu

namespace ringattn::test {
namespace {

const char* instruction_set() {
  const cpu::MicroTable* chosen = &cpu::micro_table();
#if defined(RINGATTN_CPU_WITH_AVX512_BF16)
  if (chosen == &cpu::avx512_bf16::table) return "avx512_bf16";
#endif
#if defined(RINGATTN_CPU_WITH_AVX512)
  if (chosen == &cpu::avx512::table) return "avx512";
#endif
#if defined(RINGATTN_CPU_WITH_AVX2)
  if (chosen == &cpu::avx2::table) return "avx2";
#endif
  return chosen == &cpu::generic::table ? "generic" : "unknown";
}

// All heads at once give the bits of each head alone. Four query heads are a group.
void check_each_head(const Shape& shape, std::uint64_t seed) {
  const DType dtype = shape.dtype;
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

// Tasks then take several query tiles together.
void check_many_heads(DType dtype, const Mask& mask, std::uint64_t seed) {
  Shape shape;
  shape.dtype = dtype;
  shape.Hq = 32, shape.Hkv = 8, shape.D = 8;
  shape.query_segments = shape.key_segments = {{{0, 1, 270}, {300, 1, 265}}, 2};
  shape.mask = mask;
  shape.memory = Memory::transposed;
  check_each_head(shape, seed);
}

// Keys that are made ready for some heads at a time; the last ones are fewer, and some tiles are seen by no query.
void check_rounds_of_heads(DType dtype, std::uint64_t seed) {
  Shape shape{.dtype = dtype,
              .Hq = 36,
              .Hkv = 9,
              .D = 256,
              .query_segments = {{{2000, 1, 70}}, 1},
              .key_segments = {{{0, 1, 2300}}, 1},
              .mask = {.key_count = 2300, .left = 1500, .right = 0},
              .memory = Memory::transposed};
  shape.scale = 1.0 / 16;
  check_each_head(shape, seed);
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
    current_case = std::string(kTypes[static_cast<int>(dtype)]) + " rounds of heads, seed " + std::to_string(seed);
    if (dtype != DType::float64) check_rounds_of_heads(dtype, seed);
    if (dtype == DType::float64) {  // parts of dQ that only fit into memory for one head of keys at a time
      Shape shape{.dtype = dtype,
                  .Hq = 8,
                  .Hkv = 2,
                  .D = 256,
                  .query_segments = {{{0, 1, 970}}, 1},
                  .key_segments = {{{0, 1, 1800}}, 1},
                  .mask = {.key_count = 1800, .left = 20, .right = 0}};
      shape.scale = 1.0 / 16;
      current_case = "heads in turn, seed " + std::to_string(seed);
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

int main(int argc, char** argv) try {
  using namespace ringattn::test;
  const std::uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : std::random_device{}();
  const int cases = argc > 2 ? std::atoi(argv[2]) : kRandomCases;
  std::printf("%s, seed %" PRIu64 "\n", instruction_set(), seed);
  run_micro_tests(seed);
  run_corner_cases(seed);
  run_random_cases(seed, cases);
  run_few_rows_tests(seed, cases);
  if (argc <= 2) run_matrix(seed);
  std::printf(failures ? "%d checks failed\n" : "all checks passed\n", failures);
  return failures ? 1 : 0;
} catch (const std::invalid_argument& refusal) {
  std::printf("%s\n", refusal.what());
  return 2;
}
