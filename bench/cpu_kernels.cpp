// The block kernels of the CPU, one by one on one thread, and the inner loops of the instruction set in use. Every
// benchmark first compares rows of its own result with a computation in double and is an error if they differ. FLOP/s
// count 4 (forward) and 10 (backward) times B Hq Sq Skv D, half of it under a causal mask; B/s those of keys and
// values.
//
//   cmake -S . -B build/bench -G Ninja -DRINGATTN_BENCH=ON && ninja -C build/bench ringattn_bench_cpu
//   RINGATTN_CPU=avx2 build/bench/ringattn_bench_cpu --benchmark_filter='forward/bfloat16'
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "../tests/cpu_kernels/tensors.h"
#include "cpu/kernels.h"
#include "cpu/micro.h"

namespace {

using namespace ringattn;
using test::Memory;
using test::Tensor;

constexpr double kLog2E = 1.44269504088896340736;

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return "float64";
    case DType::float32:
      return "float32";
    case DType::bfloat16:
      return "bfloat16";
    case DType::float16:
      return "float16";
  }
  return "";
}

// Of a row, over its norm: far above rounding, far below what a lost tile makes.
double tolerance(DType dtype) {
  return dtype == DType::bfloat16 ? 2e-2 : dtype == DType::float16 ? 4e-3 : dtype == DType::float32 ? 2e-5 : 1e-10;
}

// Normal numbers, quickly: rows are cut out of one bank at random.
void fill(Tensor& tensor, std::mt19937_64& random) {
  constexpr std::int64_t kBank = 1 << 15;
  Tensor bank(tensor.dtype, 1, 1, 1, kBank, Memory::contiguous);
  bank.fill_normal(random);
  const std::size_t size = test::size_of(tensor.dtype), row = tensor.D * size;
  for (std::size_t at = 0; at < tensor.bytes.size(); at += row) {
    const std::size_t from = random() % static_cast<std::uint64_t>(kBank - tensor.D) * size;
    std::copy_n(bank.bytes.begin() + from, row, tensor.bytes.begin() + at);
  }
}

struct Setting {
  DType dtype;
  std::int64_t H, Sq, Skv, D;
  bool causal;

  std::string name() const {
    return std::string("/") + name_of(dtype) + "/D=" + std::to_string(D) + (causal ? "/causal" : "/full");
  }
  double forward_flop() const { return 4.0 * H * Sq * Skv * D * (causal ? 0.5 : 1.0); }
};

// One block of attention with everything that forward and backward read and write.
struct Problem {
  explicit Problem(const Setting& setting)
      : H(setting.H), Sq(setting.Sq), Skv(setting.Skv), D(setting.D), causal(setting.causal), dtype(setting.dtype) {
    std::mt19937_64 random(1);
    for (Tensor* tensor : {&query, &key, &value, &grad_out}) fill(*tensor, random);
    for (Tensor* tensor : {&grad_query, &grad_key, &grad_value}) tensor->fill(0.0);
    args.dtype = dtype;
    args.B = 1;
    args.Hq = args.Hkv = H;
    args.Sq = Sq;
    args.Skv = Skv;
    args.D = D;
    args.scale = 1.0 / std::sqrt(static_cast<double>(D));
    args.query_segments = {{{0, 1, static_cast<std::int32_t>(Sq)}}, 1};
    args.key_segments = {{{0, 1, static_cast<std::int32_t>(Skv)}}, 1};
    args.mask.key_count = static_cast<std::int32_t>(Skv);
    if (causal) args.mask.right = 0;
    args.query = query.rows;
    args.key = key.rows;
    args.value = value.rows;
    args.out = out.rows;
    args.grad_out = grad_out.rows;
    args.grad_query = grad_query.rows;
    args.grad_key = grad_key.rows;
    args.grad_value = grad_value.rows;
    args.o = o.rows.data;
    args.m = m.rows.data;
    args.l = l.rows.data;
    args.lse = lse.rows.data;
    args.delta = delta.rows.data;
    args.finalize = true;
  }

  void forward() { cpu::kernels().forward(args, {}); }
  void backward() { cpu::kernels().backward(args, {}); }

  // Leaves the state of the block in (o, m, l), and calls that continue it.
  void carry_state() {
    args.store_state = true;
    forward();
    args.load_state = true;
  }

  double dot(const Tensor& a, std::int64_t i, const Tensor& b, std::int64_t j) const {
    double sum = 0;
    for (std::int64_t d = 0; d < D; ++d) sum += a.at(0, head, i, d) * b.at(0, head, j, d);
    return sum;
  }

  // The largest error among sampled rows of out.
  double forward_error() const {
    double worst = 0;
    for (const std::int64_t i : sampled(Sq)) {
      const std::int64_t keys = causal ? i + 1 : Skv;
      std::vector<double> p(keys), expected(D);
      double largest = -std::numeric_limits<double>::infinity(), sum = 0;
      for (std::int64_t j = 0; j < keys; ++j) largest = std::max(largest, p[j] = args.scale * dot(query, i, key, j));
      for (double& x : p) sum += x = std::exp(x - largest);
      for (std::int64_t j = 0; j < keys; ++j) {
        for (std::int64_t d = 0; d < D; ++d) expected[d] += p[j] / sum * value.at(0, head, j, d);
      }
      worst = std::max({worst, row_error(out, i, expected), std::abs(lse.at(0, head, i, 0) - largest - std::log(sum))});
    }
    return worst;
  }

  // The largest error among sampled rows of the gradients, after one backward pass; takes lse and delta as they are.
  double backward_error() const {
    double worst = 0;
    const auto probability = [&](std::int64_t i, std::int64_t j) {
      return std::exp(args.scale * dot(query, i, key, j) - lse.at(0, head, i, 0));
    };
    const auto score_gradient = [&](std::int64_t i, std::int64_t j, double p) {
      return args.scale * p * (dot(grad_out, i, value, j) - delta.at(0, head, i, 0));
    };
    for (const std::int64_t i : sampled(Sq)) {
      std::vector<double> expected(D);
      for (std::int64_t j = 0; j < (causal ? i + 1 : Skv); ++j) {
        const double ds = score_gradient(i, j, probability(i, j));
        for (std::int64_t d = 0; d < D; ++d) expected[d] += ds * key.at(0, head, j, d);
      }
      worst = std::max(worst, row_error(grad_query, i, expected));
    }
    for (const std::int64_t j : sampled(Skv / 2)) {  // the last key of a causal mask is seen by one query
      std::vector<double> expected_key(D), expected_value(D);
      for (std::int64_t i = causal ? j : 0; i < Sq; ++i) {
        const double p = probability(i, j), ds = score_gradient(i, j, p);
        for (std::int64_t d = 0; d < D; ++d) {
          expected_key[d] += ds * query.at(0, head, i, d);
          expected_value[d] += p * grad_out.at(0, head, i, d);
        }
      }
      worst = std::max({worst, row_error(grad_key, j, expected_key), row_error(grad_value, j, expected_value)});
    }
    return worst;
  }

  std::int64_t H, Sq, Skv, D;
  bool causal;
  DType dtype, A = test::accumulator_of(dtype);
  std::int64_t head = H - 1;  // the one that is checked
  Tensor query{dtype, 1, H, Sq, D, Memory::contiguous}, grad_out{dtype, 1, H, Sq, D, Memory::contiguous};
  Tensor key{dtype, 1, H, Skv, D, Memory::contiguous}, value{dtype, 1, H, Skv, D, Memory::contiguous};
  Tensor out{dtype, 1, H, Sq, D, Memory::contiguous};
  Tensor o{A, 1, H, Sq, D, Memory::contiguous}, m{A, 1, H, Sq, 1, Memory::contiguous};
  Tensor l{A, 1, H, Sq, 1, Memory::contiguous}, lse{A, 1, H, Sq, 1, Memory::contiguous};
  Tensor delta{A, 1, H, Sq, 1, Memory::contiguous};
  Tensor grad_query{A, 1, H, Sq, D, Memory::contiguous}, grad_key{A, 1, H, Skv, D, Memory::contiguous};
  Tensor grad_value{A, 1, H, Skv, D, Memory::contiguous};
  BlockArgs args;

 private:
  static std::vector<std::int64_t> sampled(std::int64_t tokens) {
    return {tokens - 1, tokens / 2, tokens / 3, tokens / 5};
  }

  double row_error(const Tensor& tensor, std::int64_t row, const std::vector<double>& expected) const {
    double error = 0, size = 0;
    for (std::int64_t d = 0; d < D; ++d) {
      const double difference = tensor.at(0, head, row, d) - expected[d];
      error += difference * difference;
      size += expected[d] * expected[d];
    }
    return std::sqrt(error / size);
  }
};

int wrong_results = 0;

// Whether an error is below a limit (NaN is not); says so to the benchmark if it is not.
bool is_right(benchmark::State& state, double error, double limit) {
  if (error <= limit) return true;
  ++wrong_results;
  state.SkipWithError(("wrong result: error " + std::to_string(error)).c_str());
  return false;
}

// work: in flop, bytes or numbers.
template <typename Run>
void time(benchmark::State& state, const char* unit, double work, const Run& run) {
  for (auto _ : state) {
    run();
    benchmark::ClobberMemory();
  }
  state.counters[unit] = benchmark::Counter(work, benchmark::Counter::kIsIterationInvariantRate);
}

void add(const std::string& name, const std::function<void(benchmark::State&)>& body,
         benchmark::TimeUnit unit = benchmark::kMillisecond) {
  benchmark::RegisterBenchmark(name.c_str(), body)->Unit(unit);
}

void add_attention(const Setting& setting) {
  add("forward" + setting.name(), [=](benchmark::State& state) {
    Problem p(setting);
    p.forward();
    if (!is_right(state, p.forward_error(), tolerance(setting.dtype))) return;
    time(state, "FLOP/s", setting.forward_flop(), [&] { p.forward(); });
  });
  // Absorbing the block a second time gives the same out; its lse is ln 2 larger.
  add("forward, from a state" + setting.name(), [=](benchmark::State& state) {
    Problem p(setting);
    p.carry_state();
    p.forward();
    p.lse.for_each([&](auto b, auto h, auto s, auto d) { p.lse.set(b, h, s, d, p.lse.at(b, h, s, d) - std::log(2)); });
    if (!is_right(state, p.forward_error(), tolerance(setting.dtype))) return;
    p.args.store_state = false;
    time(state, "FLOP/s", setting.forward_flop(), [&] { p.forward(); });
  });
  add("forward, from state to state" + setting.name(), [=](benchmark::State& state) {
    Problem p(setting);
    p.forward();
    if (!is_right(state, p.forward_error(), tolerance(setting.dtype))) return;
    p.carry_state();
    p.args.finalize = false;
    time(state, "FLOP/s", setting.forward_flop(), [&] { p.forward(); });
  });
  add("backward" + setting.name(), [=](benchmark::State& state) {
    Problem p(setting);
    p.forward();
    cpu::kernels().delta(p.args, {});
    p.backward();
    if (!is_right(state, p.backward_error(), tolerance(setting.dtype))) return;
    time(state, "FLOP/s", 2.5 * setting.forward_flop(), [&] { p.backward(); });
  });
}

void add_decode(const Setting& setting) {
  const std::string name = std::string("decode/") + name_of(setting.dtype) + "/D=" + std::to_string(setting.D);
  add(name + "/rows=" + std::to_string(setting.Sq), [=](benchmark::State& state) {
    Problem p(setting);
    p.forward();
    if (!is_right(state, p.forward_error(), tolerance(setting.dtype))) return;
    time(state, "B/s", 2.0 * setting.H * setting.Skv * setting.D * test::size_of(setting.dtype), [&] { p.forward(); });
  });
}

// --- inner loops, at the size of a tile: kTile keys and kLanes queries ---

constexpr std::int64_t kTile = 64, kLanes = cpu::kLanes;

// The largest difference of c from a b in double, over the number of terms.
double product_error(const std::vector<float>& c, const std::function<double(int, int)>& a,
                     const std::function<double(int, int)>& b, std::int64_t rows, std::int64_t depth) {
  double worst = 0;
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < kLanes; ++j) {
      double sum = 0;
      for (int k = 0; k < depth; ++k) sum += a(i, k) * b(k, j);
      worst = std::max(worst, std::abs(sum - c[i * kLanes + j]) / static_cast<double>(depth));
    }
  }
  return worst;
}

std::vector<float> normal(std::size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> numbers(count);
  for (float& x : numbers) x = distribution(generator);
  return numbers;
}

std::vector<std::uint16_t> normal_bfloat16(std::size_t count, unsigned seed) {
  std::vector<std::uint16_t> numbers;
  for (const float x : normal(count, seed)) numbers.push_back(test::encode16(x, 7));
  return numbers;
}

// Scores: [keys][D] times [D][lanes]. Output: [D][keys], which lies transposed, times [keys][lanes].
void add_float_product(std::int64_t D, bool scores) {
  const std::int64_t rows = scores ? kTile : D, depth = scores ? D : kTile;
  add(
      std::string("float product/") + (scores ? "scores" : "output") + "/D=" + std::to_string(D),
      [=](benchmark::State& state) {
        const std::vector<float> a = normal(kTile * D, 1), b = normal(depth * kLanes, 2);
        std::vector<float> c(rows * kLanes);
        cpu::Product<float> product{c.data(),
                                    kLanes,
                                    a.data(),
                                    scores ? D : 1,
                                    scores ? 1 : D,
                                    b.data(),
                                    kLanes,
                                    rows,
                                    depth,
                                    kLanes,
                                    /*accumulate=*/false};
        cpu::micro_table().float32.multiply(product);
        const auto left = [&](int i, int k) { return a[i * product.a_row_stride + k * product.a_depth_stride]; };
        const auto right = [&](int k, int j) { return b[k * kLanes + j]; };
        if (!is_right(state, product_error(c, left, right, rows, depth), 1e-5)) return;
        product.accumulate = !scores;
        time(state, "FLOP/s", 2.0 * rows * depth * kLanes, [&] { cpu::micro_table().float32.multiply(product); });
      },
      benchmark::kMicrosecond);
}

// The same of bfloat16, depth in pairs. The output's a is [keys/2][D][2].
void add_pair_product(std::int64_t D, bool scores) {
  const std::int64_t rows = scores ? kTile : D, depth = (scores ? D : kTile) / 2;
  add(
      std::string("pair product/") + (scores ? "scores" : "output") + "/D=" + std::to_string(D),
      [=](benchmark::State& state) {
        const auto a = normal_bfloat16(kTile * D, 1), b = normal_bfloat16(2 * depth * kLanes, 2);
        std::vector<float> c(rows * kLanes);
        cpu::PairProduct product{.c = c.data(),
                                 .c_stride = kLanes,
                                 .a = a.data(),
                                 .a_row_stride = scores ? D : 2,
                                 .a_depth_stride = scores ? 2 : 2 * D,
                                 .b = b.data(),
                                 .b_stride = 2 * kLanes,
                                 .rows = rows,
                                 .depth = depth,
                                 .columns = kLanes,
                                 .accumulate = false};
        const auto& multiply = cpu::micro_table().pairs.multiply;
        multiply(product);
        const auto left = [&](int i, int k) {
          return test::decode16(a[i * product.a_row_stride + k / 2 * product.a_depth_stride + k % 2], 7);
        };
        const auto right = [&](int k, int j) { return test::decode16(b[k / 2 * product.b_stride + 2 * j + k % 2], 7); };
        if (!is_right(state, product_error(c, left, right, rows, 2 * depth), 1e-5)) return;
        product.accumulate = !scores;
        time(state, "FLOP/s", 4.0 * rows * depth * kLanes, [&] { multiply(product); });
      },
      benchmark::kMicrosecond);
}

double exponential_error(const std::function<double(int, int)>& p, const std::vector<float>& scores, float factor,
                         const std::vector<float>& m) {
  double worst = 0;
  for (int n = 0; n < kTile; ++n) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double expected = std::exp2((double{scores[n * kLanes + lane]} - m[lane]) * factor);
      worst = std::max(worst, std::abs(p(n, lane) - expected) / expected);
    }
  }
  return worst;
}

void add_exponentials() {
  const auto factor = static_cast<float>(kLog2E / 8);
  const std::vector<float> m(kLanes, 4.0f), scores = normal(kTile * kLanes, 1);
  const double numbers = static_cast<double>(kTile * kLanes);
  add(
      "exponentials/float",
      [=](benchmark::State& state) {
        std::vector<float> p = scores, sum(kLanes);
        const auto& exponentials = cpu::micro_table().float32.exponentials;
        exponentials(p.data(), kTile, m.data(), factor, sum.data(), cpu::Rounding::none);
        const auto at = [&](int n, int lane) { return p[n * kLanes + lane]; };
        if (!is_right(state, exponential_error(at, scores, factor, m), 1e-6)) return;
        // In place, so what is timed are exponentials of their own results, which all are in (0, 1].
        time(state, "exp/s", numbers,
             [&] { exponentials(p.data(), kTile, m.data(), factor, sum.data(), cpu::Rounding::none); });
      },
      benchmark::kMicrosecond);
  if (cpu::micro_table().pairs.exponentials == nullptr) return;
  add(
      "exponentials/pairs",
      [=](benchmark::State& state) {
        std::vector<float> sum(kLanes);
        std::vector<std::uint16_t> p(kTile * kLanes);
        const auto run = [&] {
          cpu::micro_table().pairs.exponentials(scores.data(), kTile, m.data(), factor, sum.data(), p.data());
        };
        run();
        const auto at = [&](int n, int lane) { return test::decode16(p[n / 2 * 2 * kLanes + 2 * lane + n % 2], 7); };
        if (!is_right(state, exponential_error(at, scores, factor, m), 1.0 / 256)) return;
        time(state, "exp/s", numbers, run);
      },
      benchmark::kMicrosecond);
}

void register_benchmarks() {
  for (const DType dtype : {DType::float32, DType::bfloat16, DType::float16}) {
    for (const std::int64_t D : {64, 128}) {
      for (const bool causal : {false, true}) add_attention({dtype, 2, 2048, 2048, D, causal});
      for (const std::int64_t rows : {1, 4, 16}) add_decode({dtype, 4, rows, 65536, D, false});
    }
  }
  for (const std::int64_t D : {64, 128}) {
    for (const bool scores : {true, false}) {
      add_float_product(D, scores);
      if (cpu::micro_table().pairs.multiply != nullptr) add_pair_product(D, scores);
    }
  }
  add_exponentials();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    register_benchmarks();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return wrong_results > 0;
}
