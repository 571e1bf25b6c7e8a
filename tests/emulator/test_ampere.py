"""cp.async, ldmatrix, movmatrix and mma.sync: layouts bit for bit with small integers, all copy modes and schedules."""

# ruff: noqa: E501 CUDA and PTX texts

import numpy as np
import pytest

from emulator import compile_cuda, load
from emulator.test_faults import HEAD, check

MATMUL = r"""
#include <cuda_bf16.h>
#include <cstdint>
// C (M x N, f32) = A (M x K) B (N x K)^T. One block of 4 warps makes 64 x 64; K goes by 32, in 2 stages of cp.async.
__device__ uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ int swizzle(int row, int chunk) { return row * 32 + ((chunk ^ (row >> 1)) & 3) * 8; }
__device__ void copy(const __nv_bfloat16* g, __nv_bfloat16* s, int ld, int rows_left, int k_left) {
  for (int i = threadIdx.x; i < 256; i += 128) {
    int row = i / 4, chunk = i % 4;
    int bytes = row < rows_left && chunk * 8 < k_left ? min(16, (k_left - chunk * 8) * 2) : 0;
    const void* from = bytes ? g + (size_t)row * ld + chunk * 8 : g;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(s + swizzle(row, chunk))), "l"(from), "r"(bytes) : "memory");
  }
}
__device__ void load_matrix(uint32_t (&r)[4], const __nv_bfloat16* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
}
extern "C" __global__ __launch_bounds__(128) void matmul(const __nv_bfloat16* A, const __nv_bfloat16* B, float* C, int M, int N, int K) {
  __shared__ __align__(128) __nv_bfloat16 sA[2][64 * 32], sB[2][64 * 32];
  int m0 = blockIdx.x * 64, n0 = blockIdx.y * 64, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float acc[8][4] = {};
  auto stage = [&](int k, int s) {
    copy(A + (size_t)m0 * K + k, sA[s], K, M - m0, K - k);
    copy(B + (size_t)n0 * K + k, sB[s], K, N - n0, K - k);
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  int steps = (K + 31) / 32;
  stage(0, 0);
  for (int i = 0; i < steps; ++i) {
    if (i + 1 < steps) {
      stage((i + 1) * 32, (i + 1) & 1);
      asm volatile("cp.async.wait_group 1;" ::: "memory");
    } else {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
    __syncthreads();
    for (int k = 0; k < 2; ++k) {
      uint32_t a[4];
      load_matrix(a, &sA[i & 1][swizzle(warp * 16 + lane % 16, 2 * k + lane / 16)]);
      for (int n = 0; n < 4; ++n) {
        uint32_t b[4];
        load_matrix(b, &sB[i & 1][swizzle(n * 16 + lane % 8 + 8 * (lane / 16), 2 * k + (lane / 8) % 2)]);
        for (int h = 0; h < 2; ++h) {
          float* c = acc[2 * n + h];
          asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                       : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[2 * h]), "r"(b[2 * h + 1]));
        }
      }
    }
    __syncthreads();
  }
  for (int n = 0; n < 8; ++n)
    for (int i = 0; i < 4; ++i) {
      int row = m0 + warp * 16 + lane / 4 + 8 * (i / 2), col = n0 + n * 8 + 2 * (lane % 4) + i % 2;
      if (row < M && col < N) C[(size_t)row * N + col] = acc[n][i];
    }
}
"""


def bfloat(x):
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.fixture(scope="module")
def matmul():
    return load(compile_cuda(MATMUL))


@pytest.mark.parametrize("copies", ["early", "late", "random"])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("m, n, k", [(64, 64, 64), (70, 50, 72)])
def test_matmul(matmul, copies, seed, m, n, k):
    random = np.random.default_rng(seed)
    a, b = (random.integers(-3, 4, shape).astype(np.float32) for shape in [(m, k), (n, k)])
    c = np.full((m, n), np.nan, np.float32)
    grid = (-(-m // 64), -(-n // 64))
    report = matmul.launch(
        "matmul", grid=grid, block=128, args=[bfloat(a), bfloat(b), c, m, n, k], seed=seed, copies=copies
    )
    np.testing.assert_array_equal(c, a @ b.T)
    steps = -(-k // 32)
    assert report.matrix_flops == grid[0] * grid[1] * 2 * 64 * 64 * 32 * steps
    assert report.barriers == grid[0] * grid[1] * 2 * steps
    assert report.conflicts == 0


TF32 = r"""
#include <cstdint>
extern "C" __global__ void kernel(const float* A, const float* B, float* C) {  // A 16 x 8, B 8 x 8, C 16 x 8
  int g = threadIdx.x / 4, t = threadIdx.x % 4;
  uint32_t a[4], b[2];
  float c[4] = {};
  for (int i = 0; i < 4; ++i) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(a[i]) : "f"(A[(g + 8 * (i % 2)) * 8 + t + 4 * (i / 2)]));
  for (int i = 0; i < 2; ++i) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(b[i]) : "f"(B[(t + 4 * i) * 8 + g]));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  for (int i = 0; i < 4; ++i) C[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = c[i];
}
"""


def test_tf32():
    a, b = (np.random.default_rng(1).integers(-99, 99, s).astype(np.float32) for s in [(16, 8), (8, 8)])
    c = np.zeros((16, 8), np.float32)
    load(compile_cuda(TF32)).launch("kernel", args=[a, b, c])
    np.testing.assert_array_equal(c, a @ b)


TRANSPOSES = r"""
#include <cstdint>
extern "C" __global__ void kernel(const uint16_t* in, uint32_t* out) {  // in: 4 matrices of 8 x 8
  __shared__ __align__(16) uint16_t s[256];
  for (int i = threadIdx.x; i < 256; i += 32) s[i] = in[i];
  __syncwarp();
  uint32_t r[4], address = (uint32_t)__cvta_generic_to_shared(s + 8 * threadIdx.x);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
  for (int i = 0; i < 4; ++i) out[i * 32 + threadIdx.x] = r[i];
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(address) : "memory");
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r[1]) : "r"(r[0]));
  out[128 + threadIdx.x] = r[0];
  out[160 + threadIdx.x] = r[1];
}
"""


def test_ldmatrix_and_movmatrix():
    x = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    out = np.zeros(192, np.uint32)
    load(compile_cuda(TRANSPOSES)).launch("kernel", args=[x, out])
    got = out.view(np.uint16).reshape(6, 8, 8)
    np.testing.assert_array_equal(got[:4], x.transpose(0, 2, 1))
    np.testing.assert_array_equal(got[4], x[0])
    np.testing.assert_array_equal(got[5], x[0].T)


CP = (
    HEAD
    + """__shared__ __align__(16) int s[2][64];
  for (int i = 0; i < 2; ++i) {
    unsigned to = (unsigned)__cvta_generic_to_shared(&s[i][threadIdx.x]);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(in + threadIdx.x) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  WAIT
  BARRIER
  out[threadIdx.x] = s[0][threadIdx.x ^ OTHER];  // FAULT HERE
}"""
)


@pytest.mark.parametrize("copies", ["early", "late", "random"])
def test_wait_group_too_high(copies):
    source = CP.replace(
        "WAIT",
        'if (FAULT) asm volatile("cp.async.wait_group 2;" ::: "memory"); else asm volatile("cp.async.wait_group 1;" ::: "memory");',
    )
    check(source.replace("BARRIER", "__syncthreads();").replace("OTHER", "1"), ["cp.async"], copies=copies)


@pytest.mark.parametrize("copies", ["early", "late", "random"])
def test_missing_barrier_after_wait(copies):
    source = CP.replace("WAIT", 'asm volatile("cp.async.wait_group 1;" ::: "memory");').replace("OTHER", "33")
    source = source.replace("BARRIER", "if (!FAULT) __syncthreads();")
    with_words = ["shared"]  # a data race, or a read before the other warp's wait
    check(source, with_words, copies=copies)


def test_write_into_a_copy_in_flight():
    source = CP.replace(
        "WAIT", 'if (FAULT) s[1][threadIdx.x] = 3;\n asm volatile("cp.async.wait_group 0;" ::: "memory");'
    )
    with_line = source.replace("FAULT HERE", "").replace(
        "if (FAULT) s[1][threadIdx.x] = 3;", "if (FAULT) s[1][threadIdx.x] = 3;  // FAULT HERE"
    )
    check(with_line.replace("BARRIER", "").replace("OTHER", "0"), ["cp.async"])


def test_missing_lanes_of_ldmatrix():
    check(
        HEAD
        + """__shared__ __align__(16) int s[128];
  for (int i = threadIdx.x; i < 128; i += 32) s[i] = in[i % 64];
  __syncwarp();
  unsigned r = 0, a = (unsigned)__cvta_generic_to_shared(s + 4 * threadIdx.x);
  if (!FAULT || threadIdx.x < 8)
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(a) : "memory");  // FAULT HERE
  out[threadIdx.x] = r;
}""",
        ["missing lanes"],
        block=32,
    )
