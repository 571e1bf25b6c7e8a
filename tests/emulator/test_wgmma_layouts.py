"""wgmma from all swizzles and majors, and with A in registers; stmatrix. Shared memory is laid out here by closed forms."""

# ruff: noqa: E501 CUDA and PTX texts

import numpy as np
import pytest

from emulator import compile_cuda, load
from emulator.hopper_kernels import PRELUDE
from emulator.test_ampere import bfloat

REGISTERS = ", ".join(f"%{i}" for i in range(32))
OUTPUTS = ", ".join(f'"+f"(d[{i}])' for i in range(32))
SOURCE = (
    PRELUDE
    + r"""
extern "C" __global__ void kernel(const uint4* imageA, const uint4* imageB, unsigned long long a, unsigned long long b, const __nv_bfloat16* A, float* C) {
  extern __shared__ __align__(1024) uint4 s[];
  for (int i = threadIdx.x; i < 1024; i += 128) { s[i] = imageA[i]; s[1024 + i] = imageB[i]; }
  fence_proxy();
  __syncthreads();
  int w = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  a += (address(s) & 0x3ffff) >> 4;
  b += (address(s + 1024) & 0x3ffff) >> 4;
  float d[32] = {};
  uint32_t r[4];
  for (int i = 0; i < 4; ++i) r[i] = *(const uint32_t*)(A + (16 * w + g + 8 * (i % 2)) * 16 + 2 * t + 8 * (i / 2));
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#if RS
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {REGISTERS}, {%32, %33, %34, %35}, %36, 1, 1, 1, TB;"
    : OUTPUTS : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "l"(b));
#else
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {REGISTERS}, %32, %33, 1, 1, 1, TA, TB;" : OUTPUTS : "l"(a), "l"(b));
#endif
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < 32; ++i) C[(16 * w + g + 8 * (i / 2 % 2)) * 64 + 8 * (i / 4) + 2 * t + i % 2] = d[i];
}
"""
)
WIDTHS = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
CODES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}


def lay_out(x, swizzle, mn_major):
    """The shared-memory image of x (64 x 16, (mn, k)) and its descriptor without the address."""
    width = WIDTHS[swizzle]
    elements = width // 2
    mn, k = np.meshgrid(np.arange(64), np.arange(16), indexing="ij")
    if swizzle == "none":
        lead, stride = 256, 512  # the two core matrices of k, then the next eight of mn
        at = (
            mn % 8 * 2 + k % 8 * 16 + k // 8 * lead + mn // 8 * stride
            if mn_major
            else k % 8 * 2 + mn % 8 * 16 + mn // 8 * stride + k // 8 * lead
        )
    elif mn_major:
        stride, lead = 8 * width, 16 * width  # next eight of k, next width of mn
        at = mn % elements * 2 + mn // elements * lead + k % 8 * width + k // 8 * stride
    else:
        lead, stride = 16, 8 * width
        at = k * 2 + mn % 8 * width + mn // 8 * stride
    at ^= (at >> 7 & (width // 16 - 1)) << 4
    assert len(np.unique(at)) == at.size
    image = np.full(8192, 0x7FFF, np.uint16)  # NaN where nothing is read
    image[at // 2] = bfloat(x)
    return image, lead >> 4 << 16 | stride >> 4 << 32 | CODES[swizzle] << 62


@pytest.mark.parametrize("copies", ["early", "late"])
@pytest.mark.parametrize("swizzle", WIDTHS)
@pytest.mark.parametrize("form", ["KK", "KM", "MK", "MM", "RK", "RM"])  # A and B: K-major, MN-major, registers
def test_layouts(form, swizzle, copies):
    random = np.random.default_rng(0)
    a, b = random.integers(-9, 9, (2, 64, 16)).astype(np.float32)
    image_a, descriptor_a = lay_out(a, swizzle, form[0] == "M")
    image_b, descriptor_b = lay_out(b, swizzle, form[1] == "M")
    source = SOURCE.replace("REGISTERS", REGISTERS).replace("OUTPUTS", OUTPUTS)
    source = source.replace("TA,", f"{int(form[0] == 'M')},").replace("TB;", f"{int(form[1] == 'M')};")
    module = load(compile_cuda(source, "sm_90a", [f"-DRS={int(form[0] == 'R')}"]))
    c = np.zeros((64, 64), np.float32)
    for seed in (0, 1, 2):
        args = [image_a, image_b, np.uint64(descriptor_a), np.uint64(descriptor_b), bfloat(a), c]
        module.launch("kernel", block=128, shared_bytes=32768, args=args, seed=seed, copies=copies)
        np.testing.assert_array_equal(c, a @ b.T)


STORE = (
    PRELUDE
    + r"""
extern "C" __global__ void kernel(const uint32_t* in, uint16_t* out) {  // registers of 4 matrices, as ldmatrix gives them
  __shared__ __align__(16) uint16_t s[512];
  uint32_t r[4], to = address(s + 8 * threadIdx.x);
  for (int i = 0; i < 4; ++i) r[i] = in[i * 32 + threadIdx.x];
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to + 512), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
  __syncwarp();
  for (int i = threadIdx.x; i < 512; i += 32) out[i] = s[i];
}
"""
)


def test_stmatrix():
    x = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)  # lane 4g + t holds (g, 2t) and (g, 2t + 1)
    out = np.zeros((2, 4, 8, 8), np.uint16)
    load(compile_cuda(STORE, "sm_90a")).launch("kernel", args=[x.view(np.uint32), out])
    np.testing.assert_array_equal(out[0], x)
    np.testing.assert_array_equal(out[1], x.transpose(0, 2, 1))
