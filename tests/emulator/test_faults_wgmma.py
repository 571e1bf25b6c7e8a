"""Planted faults around wgmma: registers that are touched without a fence or while it has them."""

# ruff: noqa: E501 CUDA and PTX texts

import numpy as np
import pytest

from emulator import compile_cuda, load
from emulator.test_faults import HEAD
from emulator.test_faults_global import COPIES, SEEDS, check
from emulator.test_wgmma import WGMMA

HELPERS = WGMMA[: WGMMA.index("// C (64 x 64)")].replace("TB;", "0;")
# All elements are 1, so that layouts do not matter. pin: the compiler may not move what comes before behind it.
START = (
    HELPERS
    + r"""
__device__ void pin(float (&d)[32]) { for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(d[i]) :: "memory"); }
__device__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void close() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ void wait_group() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
__device__ void multiply_rs(float (&d)[32], uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
    : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
      "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
"""
    + HEAD
    + r"""__shared__ alignas(1024) __nv_bfloat16 s[64 * 64];
  for (int i = threadIdx.x; i < 64 * 64; i += 128) s[i] = __float2bfloat16(1);
  fence_proxy();
  __syncthreads();
  uint64_t all = descriptor(s, 16, 1024);
  float d[32];
  for (int i = 0; i < 32; ++i) d[i] = in[i];
  uint32_t a[4];
  for (int i = 0; i < 4; ++i) a[i] = in[1] * 0x3f803f80;
  pin(d);
"""
)
END = """
  int sum = 0;
  for (int i = 0; i < 32; ++i) sum += (int)d[i];
  out[threadIdx.x] = sum;
}"""
HOW = dict(arch="sm_90a", block=128, out=128)


def test_accumulators_written_without_a_fence():
    body = """fence();
  multiply(d, all, all, 1);
  close();
  wait_group<0>();
  for (int i = 0; i < 32; ++i) d[i] *= 0.5f;
  pin(d);
  if (!FAULT) fence();
  multiply(d, all, all, 1);  // FAULT HERE
  close();
  wait_group<0>();"""
    check(START + body + END, ["wgmma.fence"], **HOW)


def test_a_registers_written_without_a_fence():
    body = """fence();
  multiply_rs(d, a, all);
  close();
  wait_group<0>();
  for (int i = 0; i < 4; ++i) { a[i] ^= in[2]; asm volatile("" : "+r"(a[i]) :: "memory"); }
  if (!FAULT) fence();
  multiply_rs(d, a, all);  // FAULT HERE
  close();
  wait_group<0>();"""
    check(START + body + END, ["wgmma.fence"], **HOW)


def test_registers_that_no_wgmma_had_before():
    body = """float e[32];
  for (int i = 0; i < 32; ++i) e[i] = 0;
  pin(e);
  fence();
  multiply(d, all, all, 1);
  for (int i = 0; i < 32; ++i) e[i] += in[i];
  pin(e);
  if (!FAULT) fence();
  multiply(e, all, all, 1);  // FAULT HERE
  close();
  wait_group<0>();
  for (int i = 0; i < 32; ++i) d[i] += e[i];"""
    check(START + body + END, ["wgmma.fence"], **HOW)


def test_a_registers_written_before_the_wait():
    body = """fence();
  multiply_rs(d, a, all);
  close();
  if (!FAULT) wait_group<0>();
  asm volatile("add.u32 %0, %0, 1;" : "+r"(a[0]) :: "memory");  // FAULT HERE
  wait_group<0>();
  d[0] += a[0];"""
    check(START + body + END, ["A register written before"], **HOW)


def test_accumulators_touched_before_the_wait():
    for text in ("add.f32 %0, %0, %0", "mov.f32 %0, 0f00000000"):
        body = f"""fence();
  multiply(d, all, all, 1);
  close();
  multiply(d, all, all, 1);
  close();
  if (FAULT) wait_group<1>(); else wait_group<0>();  // the newest group still has them
  asm volatile("{text};" : "+f"(d[3]) :: "memory");  // FAULT HERE
  wait_group<0>();"""
        check(START + body + END, ["accumulator"], **HOW)


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_copies_of_accumulators_in_flight_are_poison(copies, seed):
    body = """fence();
  for (int k = 0; k < 4; ++k) multiply(d, all, all, 1);
  close();
  float early, late;
  asm volatile("mov.f32 %0, %1;" : "=f"(early) : "f"(d[5]) : "memory");
  wait_group<0>();
  asm volatile("mov.f32 %0, %1;" : "=f"(late) : "f"(d[5]) : "memory");
  out[threadIdx.x] = __float_as_int(early);
  out[128 + threadIdx.x] = __float_as_int(late);
}"""
    module = load(compile_cuda(START + body, "sm_90a"))
    out = np.zeros(256, np.int32)
    module.launch("kernel", block=128, args=[np.arange(128, dtype=np.int32), out], seed=seed, copies=copies)
    assert (out[:128] == -1).all()
    assert (out[128:].view(np.float32) == 5 + 4 * 16).all()
