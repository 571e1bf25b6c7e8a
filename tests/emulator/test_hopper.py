"""mbarriers, bulk and tensor copies, wgmma, proxies, setmaxnreg on sm_90a: right results in all copy modes, and faults."""

# ruff: noqa: E501 CUDA and PTX texts

import numpy as np
import pytest

from emulator import EmulatorError, compile_cuda, encode_tiled, load
from emulator.test_ampere import bfloat
from emulator.test_faults import HEAD, check

PRELUDE = r"""
#include <cuda_bf16.h>
#include <cstdint>
struct alignas(64) Map { char bytes[128]; };
__device__ uint32_t address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ void init(uint64_t* b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(b)), "r"(n) : "memory"); }
__device__ void expect(uint64_t* b, int n) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(b)), "r"(n) : "memory"); }
__device__ void arrive(uint64_t* b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(b)) : "memory"); }
__device__ void wait(uint64_t* b, int parity) {
  asm volatile("{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(address(b)), "r"(parity) : "memory");
}
__device__ void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void load_2d(void* s, const Map* m, int x, int y, uint64_t* b) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(address(s)), "l"(m), "r"(address(b)), "r"(x), "r"(y) : "memory");
}
__device__ void store_2d(const Map* m, int x, int y, const void* s) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(m), "r"(address(s)), "r"(x), "r"(y) : "memory");
}
__device__ void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
"""

COPY = (
    PRELUDE
    + r"""
extern "C" __global__ void round_trip(const __grid_constant__ Map from, const __grid_constant__ Map to, int rows) {
  __shared__ alignas(1024) __nv_bfloat16 s[2][32 * 64];
  __shared__ uint64_t full[2], empty[2];
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) { init(&full[i], 1); init(&empty[i], 1); }
    fence_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {  // producer
    for (int i = 0; i * 32 < rows; ++i) {
      wait(&empty[i % 2], (i / 2 & 1) ^ 1);
      expect(&full[i % 2], 32 * 64 * 2);
      load_2d(s[i % 2], &from, 0, i * 32, &full[i % 2]);
    }
  } else if (threadIdx.x >= 32) {  // consumer: doubles in place and stores
    for (int i = 0; i * 32 < rows; ++i) {
      wait(&full[i % 2], i / 2 & 1);
      for (int k = threadIdx.x - 32; k < 32 * 64; k += 64) s[i % 2][k] = __float2bfloat16(2 * __bfloat162float(s[i % 2][k]));
      if (!(FAULT & 1)) fence_proxy();
      asm volatile("bar.sync 1, 64;" ::: "memory");
      if (threadIdx.x == 32) {
        store_2d(&to, 0, i * 32, s[i % 2]);
        commit();
        wait_stores();
        arrive(&empty[i % 2]);
      }
    }
  }
}
"""
)
MODES = [(copies, seed) for copies in ("early", "late", "random") for seed in (0, 1, 2)]


@pytest.mark.parametrize("copies, seed", MODES)
@pytest.mark.parametrize("swizzle", ["none", "128B"])
def test_tensor_copies(copies, seed, swizzle):
    module = load(compile_cuda(COPY, "sm_90a", ["-DFAULT=0"]))
    rows = 150
    x = bfloat(np.random.default_rng(seed).integers(-9, 9, (rows, 64)))
    out = np.full((rows, 64), 77, np.uint16)
    maps = [encode_tiled(array, "bf16", (56, rows), (128,), (64, 32), swizzle=swizzle) for array in (x, out)]
    report = module.launch("round_trip", block=96, args=[*maps, rows], seed=seed, copies=copies)
    expected = (x.astype(np.uint32) << 16).view(np.float32) * 2
    np.testing.assert_array_equal(out[:, :56], bfloat(expected)[:, :56])
    assert (out[:, 56:] == 77).all()  # outside: not written
    assert report.copied_bytes == 2 * rows * 56 * 2


@pytest.mark.parametrize("copies, seed", MODES)
def test_missing_proxy_fence(copies, seed):
    module = load(compile_cuda(COPY, "sm_90a", ["-DFAULT=1"]))
    x = np.zeros((64, 64), np.uint16)
    out = x.copy()
    maps = [encode_tiled(array, "bf16", (64, 64), (128,), (64, 32)) for array in (x, out)]
    with pytest.raises(EmulatorError, match="proxy"):
        module.launch("round_trip", block=96, args=[*maps, 64], seed=seed, copies=copies)


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


def test_mbarrier_deadlock():
    check(
        PRELUDE
        + HEAD
        + """__shared__ uint64_t b;
  if (threadIdx.x == 0) init(&b, 64 + FAULT);
  __syncthreads();
  arrive(&b);
  wait(&b, 0);
  out[threadIdx.x] = in[threadIdx.x];
}""",
        ["deadlock", "mbarrier"],
        arch="sm_90a",
    )


def test_mbarrier_overflow():
    check(
        PRELUDE
        + HEAD
        + """__shared__ uint64_t b;
  if (threadIdx.x == 0) init(&b, 40);
  __syncthreads();
  if (threadIdx.x < 40 - 8 * FAULT) arrive(&b);
  if (FAULT) { if (threadIdx.x == 0)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 17;" :: "r"(address(&b)) : "memory"); }  // FAULT HERE
  out[threadIdx.x] = in[threadIdx.x];
}""",
        ["mbarrier", "overflow"],
        arch="sm_90a",
    )


def test_swapped_parity():
    source = (
        PRELUDE
        + HEAD
        + """__shared__ uint64_t b;
  __shared__ int s[64];
  if (threadIdx.x == 0) init(&b, 64);
  __syncthreads();
  s[threadIdx.x] = in[threadIdx.x];
  arrive(&b);
  wait(&b, FAULT);
  out[threadIdx.x] = s[63 - threadIdx.x];  // FAULT HERE
}"""
    )
    # Unwritten when the other warp has not come so far, otherwise a data race.
    check(source, ["shared"], arch="sm_90a", seeds=(0, 1, 2, 3, 4))


BULK = (
    PRELUDE
    + r"""
extern "C" __global__ void bulk(const float* in, float* out) {
  __shared__ alignas(128) float s[256];
  __shared__ uint64_t full;
  if (threadIdx.x == 0) {
    init(&full, 1);
    fence_init();
    expect(&full, 1024);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];" ::"r"(address(s)), "l"(in), "r"(address(&full)) : "memory");
  }
  __syncthreads();
  wait(&full, 0);
  for (int i = threadIdx.x; i < 256; i += 64) s[i] *= 2;
  fence_proxy();
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 1024;" ::"l"(out), "r"(address(s)) : "memory");
    commit();
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
}
"""
)


@pytest.mark.parametrize("copies, seed", MODES)
def test_bulk_copy_and_reduction(copies, seed):
    x = np.arange(256, dtype=np.float32)
    out = np.ones(256, np.float32)
    load(compile_cuda(BULK, "sm_90a")).launch("bulk", grid=3, block=64, args=[x, out], seed=seed, copies=copies)
    np.testing.assert_array_equal(out, 1 + 6 * x)


def test_tensor_map_rules():
    x = np.zeros((64, 64), np.uint16)
    good = dict(size=(64, 64), strides=(128,), box=(64, 8), swizzle="128B")
    encode_tiled(x, "bf16", **good)
    bad = [
        dict(strides=(120,)),
        dict(box=(72, 8)),
        dict(box=(64, 257)),
        dict(box=(60, 8)),
        dict(size=(0, 64)),
        dict(offset=8),
        dict(element_strides=(9, 1)),
    ]
    for change in bad:
        with pytest.raises(ValueError, match="tensor map"):
            encode_tiled(x, "bf16", **{**good, **change})


REUSE = (
    PRELUDE
    + r"""
extern "C" __global__ void reuse(float* out) {  // stores two tiles from one buffer
  __shared__ alignas(128) float s[64];
  for (int i = 0; i < 2; ++i) {
    s[threadIdx.x] = i + threadIdx.x;
    fence_proxy();
    __syncthreads();
    if (threadIdx.x == 0) {
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;" ::"l"(out + 64 * i), "r"(address(s)) : "memory");
      commit();
      if (!FAULT) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
    __syncthreads();
  }
}
"""
)


@pytest.mark.parametrize("copies, seed", MODES)
@pytest.mark.parametrize("fault", [0, 1])
def test_store_buffer_reused_before_its_wait(copies, seed, fault):
    module = load(compile_cuda(REUSE, "sm_90a", [f"-DFAULT={fault}"]))
    out = np.zeros(128, np.float32)
    if fault:
        with pytest.raises(EmulatorError, match="still reads"):
            module.launch("reuse", block=64, args=[out], seed=seed, copies=copies)
        return
    module.launch("reuse", block=64, args=[out], seed=seed, copies=copies)
    assert out.tolist() == [*range(64), *range(1, 65)]


@pytest.mark.parametrize("copies, seed", MODES)
def test_wgmma_operand_overwritten_before_the_wait(copies, seed):
    a, b, arrays, maps = operands(seed)
    source = WGMMA.replace("TB;", "0;").replace("TRANSPOSED", "0")
    broken = source.replace("  if (FAULT != 2) asm", "  sA[threadIdx.x] = __float2bfloat16(0);\n  if (FAULT != 2) asm")
    assert broken != source
    with pytest.raises(EmulatorError, match="still reads|data race"):
        module = load(compile_cuda(broken, "sm_90a", ["-DFAULT=0"]))
        module.launch("kernel", block=128, args=[*maps, np.zeros((64, 64), np.float32)], seed=seed, copies=copies)
