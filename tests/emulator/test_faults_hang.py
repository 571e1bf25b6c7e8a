"""Planted faults that make kernels hang: loops that wait for nothing, wrong phases of mbarriers, the register pool."""

# ruff: noqa: E501 CUDA and PTX texts

import time

import numpy as np
import pytest

from emulator import compile_cuda, load
from emulator.hopper_kernels import PRELUDE
from emulator.test_faults import HEAD
from emulator.test_faults import check as check_once
from emulator.test_faults_global import COPIES, SEEDS, check

SPINS = {
    "global": "while (FAULT && ((volatile int*)in)[0] == 0) {}",
    "shared": "while (FAULT && *(volatile int*)&s == 0) {}",
    "atomic": "while (FAULT && atomicAdd(&out[0], 0) == 0) {}",
    "backoff": "for (int ns = 1; FAULT && *(volatile int*)&s == 0; ns = min(2 * ns, 64)) __nanosleep(ns);",
    "some lanes": "if (threadIdx.x % 32 > 5) while (FAULT && *(volatile int*)&s == 0) {}",
    "one warp, the others at a barrier": "if (threadIdx.x >= 32) while (FAULT && *(volatile int*)&s == 0) {}",
    "a lock nobody opens": "while (atomicCAS(&s, FAULT, 0) != FAULT) {}",
    "one block": "if (blockIdx.x == 3) while (FAULT && *(volatile int*)&out[0] == 0) {}",
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", SPINS)
def test_spinning(name, threads):
    source = (
        HEAD
        + f"""__shared__ int s;
  if (threadIdx.x == 0) s = 0;
  __syncthreads();
  {SPINS[name]}
  __syncthreads();
  if (blockIdx.x == 3) out[threadIdx.x] = in[threadIdx.x];
}}"""
    )
    check_once(source, ["deadlock", "loop that it cannot leave", "source line"], grid=5, threads=threads)


def test_spinning_is_found_soon():
    module = load(compile_cuda(HEAD + "while (((volatile int*)in)[0] == 0) {}\n out[0] = 1;\n}"))
    start = time.perf_counter()
    with pytest.raises(Exception, match="deadlock"):
        module.launch("kernel", grid=20, block=1024, args=[np.zeros(1, np.int32)] * 2)
    assert time.perf_counter() - start < 20


def test_spinning_for_the_copy_engine():  # one warp waits for a copy, another one spins until the first has it
    for wait in ("wait(&full, 0);", "while (!test(&full, 0)) {}"):
        check(
            PRELUDE
            + """
__device__ bool test(uint64_t* b, int parity) {
  int done;
  asm volatile("{\\n.reg .pred p;\\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\\nselp.s32 %0, 1, 0, p;\\n}" : "=r"(done) : "r"(address(b)), "r"(parity) : "memory");
  return done;
}
"""
            + HEAD
            + f"""__shared__ alignas(128) int s[64];
  __shared__ uint64_t full;
  __shared__ int flag;
  if (threadIdx.x == 0) {{ init(&full, 1); fence_init(); flag = 0; }}
  __syncthreads();
  if (threadIdx.x == 0) {{
    expect(&full, 256 + 16 * FAULT);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];" ::"r"(address(s)), "l"(in), "r"(address(&full)) : "memory");
    {wait}
    __threadfence_block();
    *(volatile int*)&flag = 1;
  }} else if (threadIdx.x >= 32) {{
    while (*(volatile int*)&flag == 0) {{}}
    __threadfence_block();
    out[threadIdx.x] = s[threadIdx.x];
  }}
}}""",
            ["deadlock"],
            arch="sm_90a",
            seeds=(0, 1, 2),
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_long_computations_are_no_deadlock(seed):
    module = load(
        compile_cuda(
            HEAD
            + """unsigned x = in[threadIdx.x], steps = 0;
  int table[16];
  for (int i = 0; i < 16; ++i) table[i] = i * x;
  for (int i = 0; i < 400000; ++i) {
    x = x * 1664525u + 1013904223u;
    if (threadIdx.x % 3 == 0) table[x >> 28] += i;  // in local memory
    if (x % 64 == threadIdx.x) ++steps;
  }
  for (int i = 0; i < 16; ++i) steps += table[i] & 1;
  out[threadIdx.x] = steps;
}"""
        )
    )
    report = module.launch("kernel", block=64, args=[np.arange(64, dtype=np.int32), np.zeros(64, np.int32)], seed=seed)
    assert report.total > 5_000_000


def test_a_block_that_waits_for_the_last_one():
    source = """__device__ int done;
extern "C" __global__ void kernel(const int* in, int* out) {
  if (blockIdx.x == gridDim.x - 1) { if (!FAULT) atomicAdd(&done, 1); }
  else if (threadIdx.x == 0) while (*(volatile int*)&done == 0) {}
}"""
    check(source, ["deadlock"], grid=9)


def test_a_warp_that_lags_two_phases():
    # Warp 1 is busy while warp 0 ends phases; it has heard of none of them.
    check(
        PRELUDE
        + HEAD
        + """__shared__ uint64_t b;
  if (threadIdx.x == 0) init(&b, 32);
  __syncthreads();
  if (threadIdx.x < 32) {
    for (int i = 0; i < 1 + FAULT; ++i) arrive(&b);
  } else {
    unsigned x = in[threadIdx.x];
    for (int i = 0; i < 100000; ++i) x = x * 1664525u + in[i & 7];
    if (x == 77) out[0] = x;
    wait(&b, 0);  // FAULT HERE
  }
}""",
        ["mbarrier", "parity lag", "phase 2 has begun"],
        arch="sm_90a",
        seeds=(0, 2, 4),
    )


def test_a_producer_that_does_not_wait():  # more stages in flight than there are
    check(
        PRELUDE
        + HEAD
        + """__shared__ uint64_t full, empty;
  if (threadIdx.x == 0) { init(&full, 1); init(&empty, 32); }
  __syncthreads();
  for (int i = 0; i < 6; ++i) {
    if (threadIdx.x == 0) {
      if (!FAULT) wait(&empty, (i & 1) ^ 1);
      arrive(&full);
    } else if (threadIdx.x >= 32) {
      wait(&full, i & 1);
      for (int k = 0; k < 3000; ++k) asm volatile("");
      arrive(&empty);
    }
  }
}""",
        ["mbarrier", "parity lag"],
        arch="sm_90a",
    )


LAWFUL = {
    # warps take turns: each waits for every second phase only, and hears of the others through a barrier
    "every second": """for (int i = 0; i < 6; ++i) {
    arrive(&b);
    if (i % 2 == threadIdx.x / 32) wait(&b, i & 1);
    __syncthreads();
  }""",
    # nobody waits for five phases; warp 1 hears that they are over from warp 0, then both wait for the sixth
    "skipped": """for (int i = 0; i < 5; ++i) { arrive(&b); __syncthreads(); }
  arrive(&b);
  wait(&b, 1);""",
    # asked again and again for a phase that is over
    "again": """arrive(&b);
  for (int i = 0; i < 3; ++i) wait(&b, 0);
  __syncthreads();
  arrive(&b);
  for (int i = 0; i < 3; ++i) wait(&b, 1);""",
    # one lane of each warp waits
    "one lane": """for (int i = 0; i < 6; ++i) {
    arrive(&b);
    if (threadIdx.x % 32 == i) wait(&b, i & 1);
    __syncwarp();
  }""",
    # through an atomic
    "atomic": """for (int i = 0; i < 4; ++i) {
    arrive(&b);
    if (threadIdx.x < 32) { wait(&b, i & 1); if (threadIdx.x == 0) atomicAdd(&count, 1); }
    else if (threadIdx.x == 32) while (atomicAdd(&count, 0) <= i) {}
    __syncwarp();
  }
  wait(&b, 1);""",
    # a fresh barrier is passed with parity 1
    "fresh": """wait(&b, 1);
  __syncthreads();
  arrive(&b);
  wait(&b, 0);""",
}


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", LAWFUL)
def test_lawful_waits(name, seed, copies):
    module = load(
        compile_cuda(
            PRELUDE
            + HEAD
            + f"""__shared__ uint64_t b;
  __shared__ int count;
  if (threadIdx.x == 0) {{ init(&b, 64); count = 0; }}
  __syncthreads();
  {LAWFUL[name]}
}}""",
            "sm_90a",
        )
    )
    module.launch("kernel", block=64, args=[np.zeros(1, np.int32)] * 2, seed=seed, copies=copies)


def test_an_old_state():
    check(
        PRELUDE
        + HEAD
        + """__shared__ uint64_t b;
  uint64_t state;
  if (threadIdx.x == 0) init(&b, 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(address(&b)) : "memory");
    if (FAULT) arrive(&b);
    asm volatile("{\\n.reg .pred p;\\nmbarrier.test_wait.shared::cta.b64 p, [%0], %1;\\n}" :: "r"(address(&b)), "l"(state) : "memory");  // FAULT HERE
  }
}""",
        ["mbarrier", "lag"],
        arch="sm_90a",
    )


REGISTERS = """extern "C" __global__ BOUNDS void kernel(const int* in, int* out) {
  if (threadIdx.x < 128) { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(FAULT ? DOWN + 8 : DOWN)); }
  else asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(UP));  // FAULT HERE
  if (threadIdx.x < 64) out[threadIdx.x] = in[threadIdx.x];
}"""


@pytest.mark.parametrize(
    "bounds, entry, down, up",
    [
        ("__launch_bounds__(384)", 168, 24, 240),  # 65536 / 384, a multiple of 8
        ("__launch_bounds__(384, 2)", 80, 32, 104),  # 65536 / 768
        ("__maxnreg__(128)", 128, 48, 168),
        ("__maxnreg__(96)", 96, 48, 120),
        ("", 168, 40, 232),
    ],
)
def test_setmaxnreg(bounds, entry, down, up):
    source = REGISTERS.replace("BOUNDS", bounds).replace("DOWN", str(down)).replace("UP", str(up))
    words = ["setmaxnreg", "register pool", f"serve {up} per thread", f"has {entry}", "waits for registers"]
    check(source, words, arch="sm_90a", block=384)
