"""wgmma on sm_90a: right results in all copy modes, and faults."""

# ruff: noqa: E501 CUDA and PTX texts

import numpy as np
import pytest

from emulator import EmulatorError, compile_cuda, encode_tiled, load
from emulator.hopper_kernels import MODES, PRELUDE
from emulator.test_ampere import bfloat

WGMMA = (
    PRELUDE
    + r"""
__device__ uint64_t descriptor(const void* p, int lead, int stride) {
  return (uint64_t)((address(p) & 0x3ffff) >> 4) | (uint64_t)(lead >> 4) << 16 | (uint64_t)(stride >> 4) << 32 | 1ull << 62;
}
__device__ void multiply(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, p, 1, 1, 0, TB;\n}"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
      "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
    : "l"(a), "l"(b), "r"(accumulate));
}
// C (64 x 64) = A (64 x 64) B, B as (n, k) or, transposed, as (k, n)
extern "C" __global__ void kernel(const __grid_constant__ Map A, const __grid_constant__ Map B, float* C) {
  __shared__ alignas(1024) __nv_bfloat16 sA[64 * 64], sB[64 * 64];
  __shared__ uint64_t full;
  if (threadIdx.x == 0) {
    init(&full, 1);
    fence_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    expect(&full, 2 * 64 * 64 * 2);
    load_2d(sA, &A, 0, 0, &full);
    load_2d(sB, &B, 0, 0, &full);
  }
  if (FAULT != 3) wait(&full, FAULT == 4);
  float d[32];
  if (FAULT != 1) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  for (int k = 0; k < 4; ++k)
    multiply(d, descriptor(sA + 16 * k, 16, 1024), TRANSPOSED ? descriptor(sB + 16 * 64 * k, 64 * 128, 1024) : descriptor(sB + 16 * k, 16, 1024), k > 0);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  if (FAULT != 2) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  int w = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = 0; i < 32; ++i) C[(16 * w + g + 8 * ((i >> 1) & 1)) * 64 + 8 * (i >> 2) + 2 * t + (i & 1)] = d[i];
}
"""
)


def wgmma(fault, transposed):
    source = WGMMA.replace("TB;", f"{transposed};").replace("TRANSPOSED", str(transposed))
    return load(compile_cuda(source, "sm_90a", [f"-DFAULT={fault}"]))


def operands(seed):
    a, b = np.random.default_rng(seed).integers(-4, 5, (2, 64, 64)).astype(np.float32)
    arrays = [bfloat(a), bfloat(b)]
    return a, b, arrays, [encode_tiled(one, "bf16", (64, 64), (128,), (64, 64), swizzle="128B") for one in arrays]


@pytest.mark.parametrize("copies, seed", MODES)
@pytest.mark.parametrize("transposed", [0, 1])
def test_wgmma(copies, seed, transposed):
    a, b, arrays, maps = operands(seed)
    c = np.full((64, 64), np.nan, np.float32)
    report = wgmma(0, transposed).launch("kernel", block=128, args=[*maps, c], seed=seed, copies=copies)
    np.testing.assert_array_equal(c, a @ b if transposed else a @ b.T)
    assert report.matrix_flops == 2 * 64**3


@pytest.mark.parametrize("copies, seed", MODES)
@pytest.mark.parametrize(
    "fault, words",
    [
        (1, "wgmma.fence"),
        (2, "accumulator"),
        (3, "data race|cp.async|unwritten"),
        (4, "data race|cp.async|unwritten|deadlock|parity lag"),
    ],
)
def test_wgmma_faults(copies, seed, fault, words):
    a, b, arrays, maps = operands(seed)
    with pytest.raises(EmulatorError, match=words):
        wgmma(fault, 0).launch(
            "kernel", block=128, args=[*maps, np.zeros((64, 64), np.float32)], seed=seed, copies=copies
        )


@pytest.mark.parametrize("copies, seed", MODES)
def test_wgmma_operand_overwritten_before_the_wait(copies, seed):
    a, b, arrays, maps = operands(seed)
    source = WGMMA.replace("TB;", "0;").replace("TRANSPOSED", "0")
    broken = source.replace("  if (FAULT != 2) asm", "  sA[threadIdx.x] = __float2bfloat16(0);\n  if (FAULT != 2) asm")
    assert broken != source
    with pytest.raises(EmulatorError, match="still reads|data race"):
        module = load(compile_cuda(broken, "sm_90a", ["-DFAULT=0"]))
        module.launch("kernel", block=128, args=[*maps, np.zeros((64, 64), np.float32)], seed=seed, copies=copies)
