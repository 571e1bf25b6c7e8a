// The block kernels on a GPU, one by one: checked against a double-precision computation on the host, then timed with
// CUDA events. TFLOP/s count 4 (forward) and 10 (backward) times B Hq Sq Skv D, half of it under a causal mask; GB/s of
// the small kernels count each byte once.
//
//   cmake -S . -B build/bench -G Ninja -DRINGATTN_CUDA=ON -DRINGATTN_BENCH=ON && ninja -C build/bench
//   build/bench/ringattn_bench_cuda --benchmark_min_time=0.2s
#include <benchmark/benchmark.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cuda/launch.h"

namespace {

using namespace ringattn;

constexpr double kLog2E = 1.44269504088896340736;

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

template <typename T>
struct DeviceArray {
  explicit DeviceArray(std::size_t count) : count(count) {
    check(cudaMalloc(reinterpret_cast<void**>(&data), count * sizeof(T)));
  }
  explicit DeviceArray(const std::vector<T>& from) : DeviceArray(from.size()) {
    check(cudaMemcpy(data, from.data(), count * sizeof(T), cudaMemcpyHostToDevice));
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data); }

  std::vector<T> host() const {
    std::vector<T> result(count);
    check(cudaMemcpy(result.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return result;
  }

  T* data = nullptr;
  std::size_t count;
};

float to_float(std::uint16_t bits) {
  const std::uint32_t wide = std::uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &wide, sizeof(x));
  return x;
}

std::uint16_t to_bfloat16(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

std::vector<std::uint16_t> normal(std::size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution;
  std::vector<std::uint16_t> result(count);
  for (std::uint16_t& x : result) x = to_bfloat16(distribution(generator));
  return result;
}

// One block of attention in bfloat16, with everything that forward and backward read and write.
struct Problem {
  Problem(std::int64_t H, std::int64_t S, std::int64_t D, bool causal)
      : H(H),
        S(S),
        D(D),
        q(normal(H * S * D, 1)),
        k(normal(H * S * D, 2)),
        v(normal(H * S * D, 3)),
        grad_out(normal(H * S * D, 4)),
        out(H * S * D),
        grad(H * S * D),
        lse(H * S),
        minus_lse(H * S),
        delta(H * S),
        minus_delta(H * S),
        o(H * S * D),
        m(H * S),
        l(H * S),
        other_o(H * S * D),
        other_m(H * S),
        other_l(H * S),
        dq(H * S * D),
        dk(H * S * D),
        dv(H * S * D) {
    const auto rows = [&](void* data) { return Rows{data, H * S * D, S * D, D}; };
    args.dtype = DType::bfloat16;
    args.B = 1;
    args.Hq = args.Hkv = H;
    args.Sq = args.Skv = S;
    args.D = D;
    args.scale = 1.0 / std::sqrt(static_cast<double>(D));
    args.query_segments = args.key_segments = {{{0, 1, static_cast<std::int32_t>(S)}}, 1};
    args.mask.key_count = static_cast<std::int32_t>(S);
    if (causal) args.mask.right = 0;
    args.query = rows(q.data);
    args.key = rows(k.data);
    args.value = rows(v.data);
    args.out = rows(out.data);
    args.grad_out = rows(grad_out.data);
    args.grad_query = rows(dq.data);
    args.grad_key = rows(dk.data);
    args.grad_value = rows(dv.data);
    args.o = o.data;
    args.m = m.data;
    args.l = l.data;
    args.other_o = other_o.data;
    args.other_m = other_m.data;
    args.other_l = other_l.data;
    args.lse = lse.data;
    args.delta = delta.data;
    args.minus_lse_log2 = minus_lse.data;
    args.minus_delta = minus_delta.data;
  }

  // The forward pass, and what backward needs of it.
  void prepare() {
    args.finalize = true;
    cuda::kernels().forward(args, {});
    cuda::kernels().delta(args, {});
    args.finalize = false;
    args.store_state = true;
    cuda::kernels().forward(args, {});
    check(cudaMemcpy(other_o.data, o.data, o.count * sizeof(float), cudaMemcpyDeviceToDevice));
    check(cudaMemcpy(other_m.data, m.data, m.count * sizeof(float), cudaMemcpyDeviceToDevice));
    check(cudaMemcpy(other_l.data, l.data, l.count * sizeof(float), cudaMemcpyDeviceToDevice));
    for (DeviceArray<float>* gradient : {&dq, &dk, &dv}) {
      check(cudaMemset(gradient->data, 0, gradient->count * sizeof(float)));
    }
    args.store_state = false;
    args.finalize = true;
  }

  std::int64_t H, S, D;
  DeviceArray<std::uint16_t> q, k, v, grad_out, out, grad;
  DeviceArray<float> lse, minus_lse, delta, minus_delta, o, m, l, other_o, other_m, other_l, dq, dk, dv;
  BlockArgs args;
};

struct Gradients {
  std::vector<double> out, dq, dk, dv;
};

// Dense attention on the host, one head after the other.
Gradients dense(const Problem& p, bool causal) {
  const auto q = p.q.host(), k = p.k.host(), v = p.v.host(), g = p.grad_out.host();
  const std::size_t size = q.size();
  Gradients r{std::vector<double>(size), std::vector<double>(size), std::vector<double>(size),
              std::vector<double>(size)};
  std::vector<double> row(p.S);
  for (std::int64_t h = 0; h < p.H; ++h) {
    for (std::int64_t i = 0; i < p.S; ++i) {
      const std::int64_t at = (h * p.S + i) * p.D, keys = causal ? i + 1 : p.S;
      const auto dot = [&](const std::vector<std::uint16_t>& a, const std::vector<std::uint16_t>& b, std::int64_t j) {
        double sum = 0;
        for (std::int64_t d = 0; d < p.D; ++d)
          sum += double{to_float(a[at + d])} * to_float(b[(h * p.S + j) * p.D + d]);
        return sum;
      };
      double largest = -std::numeric_limits<double>::infinity(), sum = 0, delta = 0;
      for (std::int64_t j = 0; j < keys; ++j) largest = std::max(largest, row[j] = p.args.scale * dot(q, k, j));
      for (std::int64_t j = 0; j < keys; ++j) sum += row[j] = std::exp(row[j] - largest);
      for (std::int64_t j = 0; j < keys; ++j) {
        row[j] /= sum;
        for (std::int64_t d = 0; d < p.D; ++d) r.out[at + d] += row[j] * to_float(v[(h * p.S + j) * p.D + d]);
      }
      for (std::int64_t d = 0; d < p.D; ++d) delta += r.out[at + d] * to_float(g[at + d]);
      for (std::int64_t j = 0; j < keys; ++j) {
        const double ds = p.args.scale * row[j] * (dot(g, v, j) - delta);
        for (std::int64_t d = 0; d < p.D; ++d) {
          const std::int64_t key_at = (h * p.S + j) * p.D + d;
          r.dq[at + d] += ds * to_float(k[key_at]);
          r.dk[key_at] += ds * to_float(q[at + d]);
          r.dv[key_at] += row[j] * to_float(g[at + d]);
        }
      }
    }
  }
  return r;
}

double relative_error(const std::vector<double>& exact, const std::vector<float>& got) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    difference += (got[i] - exact[i]) * (got[i] - exact[i]);
    size += exact[i] * exact[i];
  }
  return std::sqrt(difference / size);
}

std::vector<float> floats(const DeviceArray<std::uint16_t>& array) {
  std::vector<float> result;
  for (const std::uint16_t x : array.host()) result.push_back(to_float(x));
  return result;
}

// Prints what is wrong before anything is timed. Rounding to bfloat16 alone makes 0.0017.
int wrong_results() {
  constexpr double kTolerance = 0.006;
  int wrong = 0;
  for (const std::int64_t D : {64, 80, 128, 256}) {
    for (const bool causal : {false, true}) {
      for (const bool deterministic : {false, true}) {
        Problem p(2, 333, D, causal);
        p.prepare();
        p.args.deterministic = deterministic;
        cuda::kernels().backward(p.args, {});
        const Gradients exact = dense(p, causal);
        const std::pair<const char*, double> errors[] = {{"out", relative_error(exact.out, floats(p.out))},
                                                         {"dq", relative_error(exact.dq, p.dq.host())},
                                                         {"dk", relative_error(exact.dk, p.dk.host())},
                                                         {"dv", relative_error(exact.dv, p.dv.host())}};
        for (const auto& [name, error] : errors) {
          if (error < kTolerance) continue;
          std::printf("wrong: %s, D = %d, causal %d, deterministic %d: error %g\n", name, static_cast<int>(D), causal,
                      deterministic, error);
          ++wrong;
        }
      }
    }
  }
  return wrong;
}

// Times run() with events; work is in flop or bytes.
template <typename Run>
void time(benchmark::State& state, const char* unit, double work, const Run& run) {
  cudaEvent_t start, stop;
  check(cudaEventCreate(&start));
  check(cudaEventCreate(&stop));
  for (int i = 0; i < 3; ++i) run();
  for (auto _ : state) {
    check(cudaEventRecord(start));
    run();
    check(cudaEventRecord(stop));
    check(cudaEventSynchronize(stop));
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, start, stop));
    state.SetIterationTime(milliseconds * 1e-3);
  }
  state.counters[unit] = benchmark::Counter(work, benchmark::Counter::kIsIterationInvariantRate);
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
}

void register_benchmarks() {
  const auto add = [](const std::string& name, auto body) {
    benchmark::RegisterBenchmark(name.c_str(), body)->UseManualTime()->Unit(benchmark::kMicrosecond);
  };
  for (const std::int64_t D : {64, 128, 256}) {
    const std::int64_t H = 2048 / D, S = 8192;
    const double pairs = static_cast<double>(H) * S * S * D, elements = static_cast<double>(H) * S * D;
    const std::string size = "/D=" + std::to_string(D);
    for (const bool causal : {false, true}) {
      const std::string name = size + (causal ? "/causal" : "/full");
      const double share = causal ? 0.5 : 1.0;
      add("forward" + name, [=](benchmark::State& state) {
        Problem p(H, S, D, causal);
        p.prepare();
        time(state, "FLOP/s", 4 * pairs * share, [&] { cuda::kernels().forward(p.args, {}); });
      });
      add("forward, carried" + name, [=](benchmark::State& state) {
        Problem p(H, S, D, causal);
        p.prepare();
        p.args.load_state = p.args.store_state = true;
        p.args.finalize = false;
        time(state, "FLOP/s", 4 * pairs * share, [&] { cuda::kernels().forward(p.args, {}); });
      });
      for (const bool deterministic : {false, true}) {
        add((deterministic ? "backward, deterministic" : "backward") + name, [=](benchmark::State& state) {
          Problem p(H, S, D, causal);
          p.prepare();
          p.args.deterministic = deterministic;
          time(state, "FLOP/s", 10 * pairs * share, [&] { cuda::kernels().backward(p.args, {}); });
        });
      }
    }
    add("finalize" + size, [=](benchmark::State& state) {
      Problem p(H, S, D, false);
      p.prepare();
      time(state, "B/s", 6 * elements, [&] { cuda::kernels().finalize(p.args, {}); });
    });
    add("merge" + size, [=](benchmark::State& state) {
      Problem p(H, S, D, false);
      p.prepare();
      time(state, "B/s", 12 * elements, [&] { cuda::kernels().merge(p.args, {}); });
    });
    add("delta" + size, [=](benchmark::State& state) {
      Problem p(H, S, D, false);
      p.prepare();
      time(state, "B/s", 4 * elements, [&] { cuda::kernels().delta(p.args, {}); });
    });
    add("cast" + size, [=](benchmark::State& state) {
      Problem p(H, S, D, false);
      p.prepare();
      p.args.out.data = p.grad.data;
      time(state, "B/s", 6 * elements, [&] {
        for (const cuda::LaunchPlan& plan : cuda::plan_cast(p.args)) cuda::launch(plan, nullptr);
      });
    });
  }
}

}  // namespace

int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("no GPU: nothing to measure");
    return 0;
  }
  const int wrong = wrong_results();
  std::printf("%d results are wrong\n", wrong);
  if (wrong > 0) return 1;
  register_benchmarks();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
