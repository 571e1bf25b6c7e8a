"""Kernels compiled from CUDA: control flow, calls, memory spaces, schedules; against numpy."""

import numpy as np
import pytest

from emulator import compile_cuda, load

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
struct Shape { float* x; int n; float scale; };
__device__ int counter;
__constant__ float table[4] = {1, 2, 3, 4};
__device__ __noinline__ float helper(float a, Shape p) { return a * p.scale + table[p.n & 3]; }
__device__ __noinline__ int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }

extern "C" __global__ void add(const float* a, const float* b, float* c, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}
extern "C" __global__ void structured(const __grid_constant__ Shape p, __nv_bfloat16* out, long long n) {
  __shared__ float s[64];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float local[8];
  for (int j = 0; j < 8; ++j) local[j] = p.x[(i + j) % p.n];
  s[threadIdx.x] = local[i & 7];
  __syncthreads();
  if (i < n) out[i] = __float2bfloat16(helper(s[threadIdx.x ^ 33], p));
  atomicAdd(&counter, 1);
}
extern "C" __global__ void recursion(int* out) { out[threadIdx.x] = fibonacci(threadIdx.x % 9); }
extern "C" __global__ void collatz(const int* in, int* steps, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  long long x = in[i];
  int count = 0;
  while (x != 1) {
    x = x & 1 ? 3 * x + 1 : x / 2;
    if (++count > 500) break;
  }
  steps[i] = count;
}
extern "C" __global__ void reduce(const float* in, float* out, int n) {
  extern __shared__ float s[];
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += in[i];
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x < 32) {
    sum = threadIdx.x < blockDim.x / 32 ? s[threadIdx.x] : 0;
    for (int d = 16; d; d /= 2) sum += __shfl_down_sync(~0u, sum, d);
    if (threadIdx.x == 0) *out = sum;
  }
}
extern "C" __global__ void cases(const int* in, int* out) {
  int x = in[threadIdx.x], r;
  switch (x) {
    case 0: r = x * 7 + 1; break;
    case 1: r = x ^ 91; break;
    case 2: r = 5 - x; break;
    case 3: r = x * x * x; break;
    case 4: r = ~x; break;
    case 5: r = x << 7; break;
    case 6: r = x - 100; break;
    case 7: r = x * 1000; break;
    default: r = -1;
  }
  __syncwarp();
  out[threadIdx.x] = r + __popc(__ballot_sync(~0u, r > 0));
}
extern "C" __global__ void lock(int* mutex, int* value) {  // lanes of one warp compete
  while (atomicCAS(mutex, 0, 1) != 0) {}
  *(volatile int*)value += 1;
  __threadfence();
  atomicExch(mutex, 0);
}
extern "C" __global__ void chain(volatile int* flags, int n) {  // block i waits for block i + 1
  if (threadIdx.x == 0) {
    if (blockIdx.x + 1 < n) while (!flags[blockIdx.x + 1]) {}
    __threadfence();
    flags[blockIdx.x] = 1;
  }
}
extern "C" __global__ void early_exit(int* out) {  // half of the threads leave before the barriers
  if (threadIdx.x >= 96) return;
  __shared__ int s[96];
  s[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = s[95 - threadIdx.x];
}
__device__ __noinline__ int leave(int x) {  // some lanes return at once, some later, some never
  if (x < 4) return x;
  if (x % 5 == 0) asm volatile("exit;");
  if (x % 2) return 2 * x;
  return x + 100;
}
extern "C" __global__ void exits(int* out) {
  int x = leave(threadIdx.x) + leave(threadIdx.x + 1);
  __syncthreads();
  out[threadIdx.x] = x + __popc(__activemask());
}
extern "C" __global__ void nested(const int* in, int* out) {  // loops in branches in loops, with breaks
  int sum = 0;
  for (int i = 0; i < in[threadIdx.x]; ++i) {
    if (i & 1) {
      for (int k = 0; k < i; ++k) {
        if (k == in[(threadIdx.x + 1) % 32]) break;
        sum += k;
      }
    } else if (i % 3 == 0) {
      continue;
    } else {
      sum -= i;
    }
    if (sum > 200) break;
  }
  out[threadIdx.x] = sum + __shfl_sync(~0u, sum, 0);
}
extern "C" __global__ void votes(int* out) {
  out[threadIdx.x] = __syncthreads_count(threadIdx.x % 3 == 0) + 1000 * __syncthreads_or(threadIdx.x == 70)
    + 10000 * __syncthreads_and(threadIdx.x < 90);
}
"""


@pytest.fixture(scope="module")
def module():
    return load(compile_cuda(SOURCE))


SEEDS = [0, 1, 2]


@pytest.mark.parametrize("seed", SEEDS)
def test_add(module, seed):
    n = 1000
    a, b = np.random.default_rng(0).standard_normal((2, n)).astype(np.float32)
    c = np.zeros(n, np.float32)
    report = module.launch("add", grid=8, block=128, args=[a.copy(), b.copy(), c, n], seed=seed)
    np.testing.assert_array_equal(c, a + b)
    assert report.global_read.bytes == 8 * n and report.global_write.bytes == 4 * n
    assert report.global_read.sectors == report.global_read.ideal == 8 * n // 32


@pytest.mark.parametrize("threads", [1, 2])
def test_struct_constant_local_call(module, threads):
    from emulator import address

    n = 64
    x = np.arange(n, dtype=np.float32)
    params = np.zeros(1, np.dtype([("x", "u8"), ("n", "i4"), ("scale", "f4")]))
    params["x"], params["n"], params["scale"] = address(x), n, 0.5
    out = np.zeros(n, np.uint16)
    module.variable("counter", np.int32)[:] = 0
    module.launch("structured", block=64, args=[params.tobytes(), out, n], threads=threads)
    i = np.arange(n) ^ 33
    expected = x[(i + i % 8) % n] * 0.5 + 1
    np.testing.assert_array_equal((out.astype(np.uint32) << 16).view(np.float32), expected)
    assert module.variable("counter", np.int32)[0] == 64


def test_recursion(module):
    out = np.zeros(32, np.int32)
    module.launch("recursion", args=[out])
    table = [0, 1, 1, 2, 3, 5, 8, 13, 21]
    assert out.tolist() == [table[i % 9] for i in range(32)]


@pytest.mark.parametrize("seed", SEEDS)
def test_divergent_loop(module, seed):
    n = 300
    values = np.arange(1, n + 1, dtype=np.int32)
    steps = np.zeros(n, np.int32)
    module.launch("collatz", grid=3, block=128, args=[values, steps, n], seed=seed)

    def length(x):
        count = 0
        while x != 1:
            x = 3 * x + 1 if x & 1 else x // 2
            count += 1
        return count

    assert steps.tolist() == [length(int(x)) for x in values]


@pytest.mark.parametrize("seed", SEEDS)
def test_reduction(module, seed):
    values = np.arange(1000, dtype=np.float32)
    out = np.zeros(1, np.float32)
    module.launch("reduce", block=256, shared_bytes=32, args=[values, out, 1000], seed=seed)
    assert out[0] == values.sum()


def test_switch(module):
    x = (np.arange(32) % 10).astype(np.int32)
    out = np.zeros(32, np.int32)
    module.launch("cases", args=[x, out])
    r = [[1, 90, 3, 27, -5, 640, -94, 7000, -1, -1][int(v)] for v in x]
    assert out.tolist() == [v + sum(q > 0 for q in r) for v in r]


@pytest.mark.parametrize("seed", SEEDS)
def test_lock_between_lanes(module, seed):
    mutex, value = np.zeros(1, np.int32), np.zeros(1, np.int32)
    module.launch("lock", grid=2, block=64, args=[mutex, value], seed=seed, limit=10**7)
    assert value[0] == 128


@pytest.mark.parametrize("seed", SEEDS)
def test_block_waits_for_a_later_one(module, seed):
    flags = np.zeros(3, np.int32)
    module.launch("chain", grid=3, args=[flags, 3], seed=seed, limit=10**8)
    assert flags.tolist() == [1, 1, 1]


@pytest.mark.parametrize("seed", SEEDS)
def test_early_exit(module, seed):
    out = np.zeros(96, np.int32)
    module.launch("early_exit", block=128, args=[out], seed=seed)
    assert out.tolist() == list(range(95, -1, -1))


@pytest.mark.parametrize("seed", SEEDS)
def test_barrier_reductions(module, seed):
    out = np.zeros(96, np.int32)
    module.launch("votes", block=96, args=[out], seed=seed)
    assert out.tolist() == [32 + 1000] * 96


@pytest.mark.parametrize("seed", SEEDS)
def test_exit_inside_a_function(module, seed):
    out = np.full(32, -1, np.int32)
    module.launch("exits", args=[out], seed=seed)

    def leave(x):
        return x if x < 4 else None if x % 5 == 0 else 2 * x if x % 2 else x + 100

    pairs = [(leave(t), leave(t + 1)) for t in range(32)]
    alive = sum(None not in pair for pair in pairs)
    assert out.tolist() == [-1 if None in pair else sum(pair) + alive for pair in pairs]


@pytest.mark.parametrize("seed", SEEDS)
def test_nested_divergence(module, seed):
    x = np.random.default_rng(seed).integers(0, 30, 32).astype(np.int32)
    out = np.zeros(32, np.int32)
    module.launch("nested", args=[x, out], seed=seed)
    sums = []
    for t in range(32):
        total = 0
        for i in range(x[t]):
            if i & 1:
                for k in range(i):
                    if k == x[(t + 1) % 32]:
                        break
                    total += k
            elif i % 3 == 0:
                continue
            else:
                total -= i
            if total > 200:
                break
        sums.append(total)
    assert out.tolist() == [one + sums[0] for one in sums]
