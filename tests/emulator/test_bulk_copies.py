"""Bulk and tensor copies in pipelines: right results in all copy modes, and faults."""

# ruff: noqa: E501 CUDA and PTX texts

import numpy as np
import pytest

from emulator import EmulatorError, compile_cuda, encode_tiled, load
from emulator.hopper_kernels import MODES, PRELUDE
from emulator.test_ampere import bfloat

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
