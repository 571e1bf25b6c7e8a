"""Atomics, vector accesses, spaces and generic addresses."""

# ruff: noqa: E501 CUDA and PTX texts

import numpy as np
import pytest

from emulator import EmulatorError, address, compile_cuda, load
from emulator.instruction_runner import ORDER_OF_LANES

SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
__global__ void histogram(const int* in, unsigned* out, int n) {
  __shared__ unsigned bins[16];
  if (threadIdx.x < 16) bins[threadIdx.x] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&bins[in[i] & 15], 1u);
  __syncthreads();
  if (threadIdx.x < 16) atomicAdd(&out[threadIdx.x], bins[threadIdx.x]);
}
__global__ void atomics(int* i, unsigned* u, unsigned long long* l, float* f, double* d, __half2* h, __nv_bfloat162* b) {
  int t = threadIdx.x;
  atomicMin(&i[0], t - 40); atomicMax(&i[1], t - 40); atomicAnd(&i[2], ~(1 << t % 32)); atomicOr(&i[3], 1 << t % 32); atomicXor(&i[4], t);
  atomicInc(&u[0], 9); atomicDec(&u[1], 9); u[2 + t] = atomicExch(&u[1000], t);
  atomicAdd(&l[0], 1ull << 33); atomicMax(&l[1], (unsigned long long)t << 40);
  atomicAdd(f, 0.5f); atomicAdd(d, 0.25);
  atomicAdd(h, __floats2half2_rn(1, 2)); atomicAdd(b, __floats2bfloat162_rn(1, 2));
}
__device__ __noinline__ int load(const int* p) { return *p; }  // a generic address
__global__ void generic(const int* in, int* out) {
  __shared__ int s[32];
  int local[4];
  for (int k = 0; k < 4; ++k) local[k] = in[k] * 100;
  s[threadIdx.x] = in[threadIdx.x] + 1;
  __syncwarp();
  const int* from = threadIdx.x % 3 == 0 ? in + threadIdx.x : threadIdx.x % 3 == 1 ? s + threadIdx.x : local + threadIdx.x % 4;
  out[threadIdx.x] = load(from);
}
struct Node { Node* next; int value; };
__global__ void list(const Node* head, int* out) { int sum = 0; for (; head; head = head->next) sum += head->value; *out = sum; }
__global__ void vectors(const short4* in, char4* out, double2* wide) {
  short4 v = in[threadIdx.x];
  out[threadIdx.x] = make_char4(v.w, v.z, v.y, v.x);
  wide[threadIdx.x] = make_double2(v.x * 0.5, v.y);
}
"""


@pytest.fixture(scope="module")
def module():
    return load(compile_cuda(SOURCE))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_histogram(module, threads, seed):
    x = np.random.default_rng(seed).integers(0, 1000, 2000).astype(np.int32)
    out = np.zeros(16, np.uint32)
    module.launch("histogram", grid=5, block=96, args=[x, out, 2000], threads=threads, seed=seed)
    assert out.tolist() == np.bincount(x & 15, minlength=16).tolist()


def test_atomics(module):
    i = np.array([0, 0, -1, 0, 0], np.int32)
    u = np.zeros(1001, np.uint32)
    wide, f, d = np.zeros(2, np.uint64), np.zeros(1, np.float32), np.zeros(1, np.float64)
    h, b = np.zeros(2, np.float16), np.zeros(2, np.uint16)
    module.launch("atomics", block=64, args=[i, u, wide, f, d, h, b], undefined=ORDER_OF_LANES)
    assert i.tolist() == [-40, 23, 0, -1, 0]
    assert u[0] == 64 % 10 and u[1] == [0, 9, 8, 7, 6, 5, 4, 3, 2, 1][64 % 10]
    assert sorted(u[2:66].tolist() + [u[1000]]) == sorted([0, *range(64)])
    assert wide.tolist() == [64 << 33, 63 << 40] and f[0] == 32 and d[0] == 16
    assert h.tolist() == [64, 128] and (b.astype(np.uint32) << 16).view(np.float32).tolist() == [64, 128]


def test_generic_addresses(module):
    x = np.arange(32, dtype=np.int32) + 7
    out = np.zeros(32, np.int32)
    module.launch("generic", args=[x, out])
    assert out.tolist() == [[x[t], x[t] + 1, x[t % 4] * 100][t % 3] for t in range(32)]


def test_pointers_in_arrays(module):
    nodes = [np.zeros(1, np.dtype([("next", "u8"), ("value", "i4"), ("pad", "i4")])) for _ in range(3)]
    for k, node in enumerate(nodes):
        node["value"] = 10**k
        node["next"] = address(nodes[k + 1]) if k < 2 else 0
    out = np.zeros(1, np.int32)
    module.launch("list", block=1, args=[nodes[0], out])
    assert out[0] == 111


def test_vectors(module):
    x = np.random.default_rng(0).integers(-100, 100, (32, 4)).astype(np.int16)
    out, wide = np.zeros((32, 4), np.int8), np.zeros((32, 2))
    module.launch("vectors", args=[x, out, wide])
    np.testing.assert_array_equal(out, x[:, ::-1])
    np.testing.assert_array_equal(wide, x[:, :2] * [0.5, 1])


def test_read_only_arrays_are_not_written(module):
    out = np.zeros(16, np.uint32)
    out.flags.writeable = False
    with pytest.raises(EmulatorError, match="read-only"):
        module.launch("histogram", block=32, args=[np.zeros(9, np.int32), out, 9])


def test_same_result_for_the_same_seed(module):
    x = np.random.default_rng(0).integers(0, 1000, 2000).astype(np.int32)
    reports = []
    for _ in range(2):
        reports.append(module.launch("histogram", grid=5, block=96, args=[x, np.zeros(16, np.uint32), 2000], seed=7))
    assert reports[0] == reports[1]


def test_static_shared_memory_is_that_of_the_kernel():
    """Three kernels of 40 KiB each, and a function's own 4 KiB behind which they lie."""
    kernel = """extern "C" __global__ void k{0}(int* out) {{
  __shared__ int s[10240];
  for (int i = threadIdx.x; i < 10240; i += 32) s[i] = i + {0};
  __syncwarp();
  out[threadIdx.x] = s[10239 - threadIdx.x] + own(threadIdx.x);
}}
"""
    own = (
        "__device__ __noinline__ int own(int x) { __shared__ int s[1024]; s[x] = x; __syncwarp(); return s[x ^ 1]; }\n"
    )
    module = load(compile_cuda(own + "".join(kernel.format(k) for k in range(3))))
    for k in range(3):
        out = np.zeros(32, np.int32)
        module.launch(f"k{k}", args=[out])
        assert out.tolist() == [10239 - t + k + (t ^ 1) for t in range(32)]
