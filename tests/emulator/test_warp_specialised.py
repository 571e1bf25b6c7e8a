"""A matrix product as Hopper kernels are built: a producer warpgroup with TMA, two consumers with wgmma, setmaxnreg."""

# ruff: noqa: E501 CUDA texts

import numpy as np
import pytest

from emulator import EmulatorError, compile_cuda, encode_tiled, load
from emulator.hopper_kernels import MODES
from emulator.test_ampere import bfloat
from emulator.test_wgmma import WGMMA

HELPERS = WGMMA[: WGMMA.index("// C (64 x 64)")].replace("TB;", "0;")
SOURCE = (
    HELPERS
    + r"""
// C (M x N) = A (M x K) B (N x K)^T; a block makes 128 x 64; K in steps of 64 through 2 stages
extern "C" __global__ __launch_bounds__(384) void matmul(const __grid_constant__ Map A, const __grid_constant__ Map B, float* C, int N, int K) {
  extern __shared__ __align__(1024) __nv_bfloat16 s[];  // per stage: A 128 x 64, B 64 x 64
  __shared__ uint64_t full[2], empty[2];
  const int tile = 192 * 64;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) { init(&full[i], 1); init(&empty[i], 2); }
    fence_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0)
      for (int i = 0; i * 64 < K; ++i) {
        __nv_bfloat16* stage = s + i % 2 * tile;
        if (FAULT != 1) wait(&empty[i % 2], (i / 2 & 1) ^ 1);
        expect(&full[i % 2], tile * 2 - (FAULT == 2) * 16);
        load_2d(stage, &A, i * 64, blockIdx.x * 128, &full[i % 2]);
        load_2d(stage + 64 * 64, &A, i * 64, blockIdx.x * 128 + 64, &full[i % 2]);
        load_2d(stage + 128 * 64, &B, i * 64, blockIdx.y * 64, &full[i % 2]);
      }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  int group = threadIdx.x / 128 - 1;
  float d[32] = {};
  for (int i = 0; i * 64 < K; ++i) {
    __nv_bfloat16* stage = s + i % 2 * tile;
    wait(&full[i % 2], i / 2 & 1);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    for (int k = 0; k < 4; ++k) multiply(d, descriptor(stage + group * 64 * 64 + 16 * k, 16, 1024), descriptor(stage + 128 * 64 + 16 * k, 16, 1024), i + k > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (FAULT == 3) {
      if (threadIdx.x % 128 == 0) arrive(&empty[i % 2]);  // released before it was read
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    } else {
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (i > 0 && threadIdx.x % 128 == 0) arrive(&empty[(i - 1) % 2]);
    }
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  int w = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 32; ++i)
    C[(size_t)(blockIdx.x * 128 + group * 64 + 16 * w + g + 8 * (i / 2 % 2)) * N + blockIdx.y * 64 + 8 * (i / 4) + 2 * t + i % 2] = d[i];
}
"""
)


def launch(fault, copies, seed, k=320):
    module = load(compile_cuda(SOURCE, "sm_90a", [f"-DFAULT={fault}"]))
    random = np.random.default_rng(seed)
    a, b = random.integers(-3, 4, (256, k)).astype(np.float32), random.integers(-3, 4, (128, k)).astype(np.float32)
    arrays = [bfloat(a), bfloat(b)]
    maps = [encode_tiled(one, "bf16", (k, len(one)), (2 * k,), (64, 64), swizzle="128B") for one in arrays]
    c = np.zeros((256, 128), np.float32)
    report = module.launch(
        "matmul",
        grid=(2, 2),
        block=384,
        shared_bytes=2 * 192 * 64 * 2,
        args=[*maps, c, 128, k],
        seed=seed,
        copies=copies,
    )
    return a @ b.T, c, report


@pytest.mark.parametrize("copies, seed", MODES)
def test_matmul(copies, seed):
    expected, got, report = launch(0, copies, seed)
    np.testing.assert_array_equal(got, expected)
    assert report.matrix_flops == 2 * 256 * 128 * 320


@pytest.mark.parametrize("copies, seed", MODES)
@pytest.mark.parametrize(
    "fault, words",
    [
        (1, "data race|still reads|copy to it is in flight|overflow"),  # the producer does not wait for the consumers
        (2, "deadlock|mbarrier|data race|cp.async"),  # the wrong number of bytes
        (3, "data race|still reads|in flight"),  # a stage is released before wgmma has read it
    ],
)
def test_faults(copies, seed, fault, words):
    with pytest.raises(EmulatorError, match=words):
        launch(fault, copies, seed)
