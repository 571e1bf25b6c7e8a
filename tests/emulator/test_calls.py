"""Calls: by name, recursive, by address and virtual, with lanes that call different functions; printf and assert."""

# ruff: noqa: E501 CUDA and PTX texts

import numpy as np
import pytest

from emulator import EmulatorError, compile_cuda, load

SOURCE = r"""
#include <cassert>
#include <cstdio>
__device__ __noinline__ int twice(int x) { return 2 * x; }
__device__ __noinline__ int square(int x) { return x * x; }
__device__ __noinline__ int sum_to(int x) { return x ? x + sum_to(x - 1) : 0; }
__device__ __noinline__ int over_lanes(int x) { return __reduce_add_sync(__activemask(), x); }
typedef int (*F)(int);
__device__ F table[4] = {twice, square, sum_to, over_lanes};
struct Shape { __device__ virtual float area(float x) const = 0; };
struct Circle : Shape { float r; __device__ Circle(float r) : r(r) {} __device__ float area(float x) const override { return 3 * r * r + x; } };
struct Box : Shape { float a, b; __device__ Box(float a, float b) : a(a), b(b) {} __device__ float area(float x) const override { return a * b - x; } };
extern "C" __global__ void indirect(const int* which, int* out) {
  int t = threadIdx.x, sum = 0;
  for (int i = 0; i < 3; ++i) sum += table[which[(t + i) % 32]](t);
  out[t] = sum;
  __syncwarp();
  out[t] += __shfl_xor_sync(~0u, t, 1);  // all have come back
}
extern "C" __global__ void nobody(int* out) { F f = (F)(out[0] + 5ull); out[threadIdx.x] = f(3); }
extern "C" __global__ void shapes(const int* which, float* out) {
  Circle c(2);
  Box b(3, 4);
  const Shape* s = which[threadIdx.x] ? (const Shape*)&c : &b;
  out[threadIdx.x] = s->area(threadIdx.x);
}
extern "C" __global__ void print(int n, double d) {
  if (threadIdx.x > n) printf("thread %d of %+i: %6.2f %-4s|%c %% %llx %p %*d\n", threadIdx.x, n, d, "abc", 'x', 0x123456789abcull, (void*)0x10, 4, 7);
  if (threadIdx.x == 0) printf("done\n");
}
extern "C" __global__ void check(const int* in) {
  assert(in[threadIdx.x] < 5 && "small");
}
"""


@pytest.fixture(scope="module")
def module():
    return load(compile_cuda(SOURCE))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_calls_by_address(module, kinds, seed):
    which = np.random.default_rng(seed).integers(0, kinds, 32).astype(np.int32)
    out = np.zeros(32, np.int32)
    functions = [lambda x: 2 * x, lambda x: x * x, lambda x: x * (x + 1) // 2]
    module.launch("indirect", args=[which, out], seed=seed)
    assert out.tolist() == [sum(functions[which[(t + i) % 32]](t) for i in range(3)) + (t ^ 1) for t in range(32)]


def test_lanes_of_one_callee_call_together(module):
    which = np.full(32, 3, np.int32)
    which[::4] = 0
    out = np.zeros(32, np.int32)
    module.launch("indirect", args=[which, out])
    together = [[t for t in range(32) if (t + i) % 4] for i in range(3)]
    expected = [sum(sum(together[i]) if (t + i) % 4 else 2 * t for i in range(3)) + (t ^ 1) for t in range(32)]
    assert out.tolist() == expected


def test_virtual_calls(module):
    which = np.arange(32, dtype=np.int32) % 3 % 2
    out = np.zeros(32, np.float32)
    module.launch("shapes", args=[which, out])
    assert out.tolist() == [12 + t if which[t] else 12 - t for t in range(32)]


def test_call_of_no_function(module):
    with pytest.raises(EmulatorError, match="call of 0x5, where no function is"):
        module.launch("nobody", args=[np.zeros(32, np.int32)])


def test_printf(module):
    report = module.launch("print", grid=2, args=[29, 2.5])
    line = "thread {} of +29:   2.50 abc |x % 123456789abc 0x10    7\n"
    assert report.printed == 2 * (line.format(30) + line.format(31) + "done\n")
    assert module.launch("check", args=[np.zeros(32, np.int32)]).printed == ""


def test_assert(module):
    x = np.zeros(32, np.int32)
    x[[7, 9]] = 5
    with pytest.raises(EmulatorError) as caught:
        module.launch("check", args=[x])
    text = str(caught.value)
    assert 'assertion failed: in[threadIdx.x] < 5 && "small", ' in text and "void check(const int *)" in text
    assert "lanes 7 9" in text and f"kernel.cu:{SOURCE.split('assert(')[0].count(chr(10)) + 1}" in text


def test_unknown_functions_are_refused():
    source = 'extern "C" __global__ void kernel(void** out) { out[0] = malloc(16); }\n'
    with pytest.raises(EmulatorError, match=r"call of malloc, which this module does not define"):
        load(compile_cuda(source))
