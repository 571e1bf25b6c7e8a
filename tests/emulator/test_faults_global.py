"""Planted faults in the order of accesses to global memory: between blocks, warps and lanes, and to the async proxy."""

# ruff: noqa: E501 CUDA and PTX texts

import numpy as np
import pytest

from emulator import EmulatorError, compile_cuda, encode_tiled, load
from emulator.hopper_kernels import PRELUDE
from emulator.test_faults import HEAD
from emulator.test_faults import check as check_once

COPIES = ("early", "late", "random")
SEEDS = (0, 1, 2, 3, 4)


def check(source, words, **how):
    for copies in COPIES:
        check_once(source, words, **{"seeds": SEEDS, "copies": copies, **how})


def test_warps_of_a_block():
    check(
        HEAD
        + """out[threadIdx.x] = in[threadIdx.x];  // FAULT HERE, whichever comes second
  if (!FAULT) __syncthreads();
  int x = *(volatile int*)&out[63 - threadIdx.x];  // FAULT HERE
  if (!FAULT) __syncthreads();
  if (x < 0) out[threadIdx.x] = x;
}""",
        ["data race", "warp 0", "warp 1", "global memory byte", "argument 1"],
    )


def test_read_then_written_by_another_warp():
    check(
        HEAD
        + """int x = out[63 - threadIdx.x];  // FAULT HERE
  if (!FAULT) __syncthreads();
  out[threadIdx.x] = x + in[threadIdx.x];  // FAULT HERE
}""",
        ["data race", "global memory"],
    )


def test_bytes_side_by_side():  # bytes of one word belong to different warps
    check(
        HEAD
        + """char* bytes = (char*)out;
  int i = threadIdx.x % 32 * 2 + threadIdx.x / 32;
  bytes[FAULT ? i / 2 * 2 + (i & 1 & (i != 7)) : i] = in[threadIdx.x];  // FAULT HERE
}""",
        ["data race", "overwrites a write", "byte 6 of argument 1"],
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_that_write_the_same(threads):
    check(
        HEAD + "  out[threadIdx.x + (FAULT ? 63 : 64) * blockIdx.x] = in[threadIdx.x];  // FAULT HERE\n}",
        ["data race", "overwrites a write", "of block ("],
        grid=4,
        out=256,
        threads=threads,
    )


# The last block to finish adds what all have written.
LAST = """__device__ unsigned count;
extern "C" __global__ void kernel(const int* in, int* out) {
  __shared__ bool last;
  out[1 + blockIdx.x * 64 + threadIdx.x] = in[threadIdx.x];  // WRITTEN
  FENCE_ALL;
  BARRIER;
  if (threadIdx.x == 0) {
    FENCE;
    last = atomicInc(&count, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && threadIdx.x < 32) {
    int sum = 0;
    for (int i = threadIdx.x; i < 64 * gridDim.x; i += 32) sum += out[1 + i];  // FAULT HERE
    sum = __reduce_add_sync(~0u, sum);
    if (threadIdx.x == 0) out[0] = sum;
  }
}"""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("fault", ["FENCE", "BARRIER"])
def test_last_block(fault, threads):
    fixed = {"FENCE": "__threadfence()", "BARRIER": "__syncthreads()"}
    source = LAST.replace("FENCE_ALL;", "")
    for word, text in fixed.items():
        source = source.replace(f"{word};", f"if (!FAULT) {text};" if word == fault else f"{text};")
    words = ["data race", "of block ("]
    if threads == 1:
        words.append("reads what is a write")
    else:  # when blocks really run at the same time, a write may also come after the read
        source = source.replace("// WRITTEN", "// FAULT HERE, too")
    check(source, words, grid=5, out=400, threads=threads)


def test_last_block_whose_threads_fence_before_the_barrier():
    source = LAST.replace("FENCE_ALL;", "if (FAULT) __threadfence_block(); else __threadfence();")
    check(source.replace("BARRIER;", "__syncthreads();").replace("FENCE;", ""), ["data race"], grid=5, out=400)


SEMAPHORE = """__device__ int turn[2];
extern "C" __global__ void kernel(const int* in, int* out) {
  if (blockIdx.x == 0 && threadIdx.x == 0) turn[0] = turn[1] = 0;
  if (threadIdx.x == 0) { WAIT }
  if (!(FAULT & 1)) __syncthreads();
  out[threadIdx.x] += in[threadIdx.x];  // FAULT HERE
  if (!(FAULT & 2)) __syncthreads();
  if (threadIdx.x == 0) { SIGNAL }
}""".replace("if (blockIdx.x == 0 && threadIdx.x == 0) turn[0] = turn[1] = 0;", "")
WAYS = {
    "acquire": (
        'int seen; do { asm volatile("ld.global.acquire.gpu.b32 %0, [%1];" : "=r"(seen) : "l"(turn) : "memory"); } while (seen != blockIdx.x);',
        # Never a turn that no block waits for: a launch that stops at its fault leaves it to the next one.
        'if (blockIdx.x == gridDim.x - 1) atomicExch(turn, 0); else asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(turn) : "memory");',
    ),
    "volatile": (
        "while (*(volatile int*)turn != blockIdx.x) {} __threadfence();",
        "__threadfence(); *(volatile int*)turn = (blockIdx.x + 1) % gridDim.x;",
    ),
    "atomic": (
        "while (atomicAdd(turn, 0) != blockIdx.x) {}",
        "__threadfence(); atomicExch(turn, (blockIdx.x + 1) % gridDim.x);",
    ),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_semaphore(way, threads):
    wait, signal = WAYS[way]
    source = SEMAPHORE.replace("WAIT", wait).replace("SIGNAL", signal)
    # The waits of all warps but the first, then what their threads write before the signal.
    for bit in (1, 2):
        one = source.replace(f"FAULT & {bit}", "FAULT").replace(f"FAULT & {3 - bit}", "0")
        check(one, ["data race", "of block ("], grid=4, threads=threads)


def test_lock():
    check(
        """__device__ int lock;
extern "C" __global__ void kernel(const int* in, int* out) {
  if (threadIdx.x % 32 < 3) {
    while (!FAULT && atomicCAS(&lock, 0, 1)) {}
    if (!FAULT) __threadfence();
    out[0] += in[threadIdx.x];  // FAULT HERE
    if (!FAULT) __threadfence();
    if (!FAULT) atomicExch(&lock, 0);
  }
}""",
        ["data race"],
        grid=3,
    )


def test_lanes_that_store_to_one_address():
    for space in ("out", "s"):
        check(
            HEAD
            + f"""__shared__ int s[64];
  {space}[FAULT && threadIdx.x == 38 ? 37 : threadIdx.x] = in[threadIdx.x];  // FAULT HERE
  __syncthreads();
  if (threadIdx.x == 38) {space}[38] = 1;
  __syncthreads();
  if (threadIdx.x < 32) {space}[40] = 7;  // the same from all
  out[threadIdx.x] = {space}[threadIdx.x < 38 ? 3 : 38];
}}""".replace("  out[threadIdx.x] = out[threadIdx.x < 38 ? 3 : 38];\n", ""),
            ["data race", "lanes 5 and 6", "different values"],
        )


def test_lanes_that_read_what_others_wrote():
    for space in ("out", "s"):
        check(
            HEAD
            + f"""__shared__ int s[64];
  {space}[threadIdx.x] = in[threadIdx.x];
  if (!FAULT) __syncwarp();
  int x = {space}[threadIdx.x ^ 1];  // FAULT HERE
  __syncwarp();
  out[threadIdx.x] = x;
}}""",
            ["data race", "lane 0 reads what lane 1", "__syncwarp"],
        )


def test_shuffle_orders_lanes():
    module = load(
        compile_cuda(
            HEAD
            + """__shared__ int s[64];
  s[threadIdx.x] = in[threadIdx.x];
  int x = __shfl_xor_sync(~0u, threadIdx.x, 1);
  out[threadIdx.x] = s[x];
}"""
        )
    )
    out = np.zeros(64, np.int32)
    module.launch("kernel", block=64, args=[np.arange(64, dtype=np.int32), out])
    assert out.tolist() == [i ^ 1 for i in range(64)]


def test_flags():  # strong accesses order, also lanes of one warp; the flag itself is no race
    for kind in ("__device__", "__shared__"):
        check(
            f"""__device__ int ready;
extern "C" __global__ void kernel(const int* in, int* out) {{
  __shared__ int s[64], flag;
  int* data = {"s" if kind == "__shared__" else "out"};
  volatile int* there = {"&flag" if kind == "__shared__" else "&ready"};
  if (threadIdx.x == 0) *there = 0;
  __syncthreads();
  if (threadIdx.x == 37) {{
    data[1] = in[5];  // FAULT HERE
    __threadfence();
    *there = 1;
  }}
  if (threadIdx.x == 3 || threadIdx.x == 40) {{
    while (!FAULT && *there == 0) {{}}
    __threadfence();
    data[threadIdx.x] = data[1];  // FAULT HERE
  }}
  if (FAULT && threadIdx.x == 37) data[1] = 3;  // FAULT HERE
}}""",
            ["data race"] if kind == "__device__" else ["shared"],
        )


def test_copies_of_other_lanes():  # its own wait says nothing about what other lanes have copied
    check(
        HEAD
        + """__shared__ alignas(16) int s[4 * 64];
  int i = 4 * threadIdx.x;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(s + i)), "l"(in + i) : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
  if (!FAULT) __syncwarp();
  out[threadIdx.x] = s[i ^ 4];  // FAULT HERE
}""",
        ["data race", "__syncwarp"],
        out=256,
    )


def test_matrix_load_of_other_lanes():
    check(
        HEAD
        + """__shared__ alignas(16) int s[2][32];
  int w = threadIdx.x / 32, lane = threadIdx.x % 32, x;
  s[w][lane] = in[threadIdx.x];
  if (!FAULT) __syncwarp();
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(x) : "r"((unsigned)__cvta_generic_to_shared(&s[w][lane % 8 * 4])) : "memory");  // FAULT HERE
  out[threadIdx.x] = x;
}""",
        ["data race", "__syncwarp"],
    )


# Writes 64 floats, then loads them with a bulk copy.
ROUND_TRIP = (
    PRELUDE
    + HEAD
    + """__shared__ alignas(128) int s[64];
  __shared__ uint64_t full;
  if (threadIdx.x == 0) { init(&full, 1); fence_init(); }
  out[threadIdx.x] = in[threadIdx.x];
  BEFORE;
  __syncthreads();
  if (threadIdx.x == 0) {
    BEHIND;
    expect(&full, 256);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];" ::"r"(address(s)), "l"(out), "r"(address(&full)) : "memory");  // FAULT HERE
  }
  wait(&full, 0);
  out[threadIdx.x] = s[63 - threadIdx.x];
}"""
)


@pytest.mark.parametrize("where", ["BEFORE", "BEHIND"])
@pytest.mark.parametrize("kind", ["async.global", "async"])
def test_bulk_load_of_generic_writes(where, kind):
    source = ROUND_TRIP
    for place in ("BEFORE", "BEHIND"):
        text = f'if (!FAULT) asm volatile("fence.proxy.{kind};" ::: "memory")' if place == where else ""
        source = source.replace(f"{place};", f"{text};")
    check(source, ["fence.proxy.async", "generic write of warp", "global memory"], arch="sm_90a")


def test_the_fence_of_shared_memory_is_not_enough():
    source = ROUND_TRIP.replace("BEFORE;", "if (FAULT) fence_proxy(); else asm volatile(\"fence.proxy.async;\" ::: \"memory\");").replace("BEHIND;", "")  # fmt: skip
    check(source, ["fence.proxy.async", "global memory"], arch="sm_90a")


TENSOR = (
    PRELUDE
    + """
extern "C" __global__ void kernel(const __grid_constant__ Map map, __nv_bfloat16* x, __nv_bfloat16* out) {
  __shared__ alignas(1024) __nv_bfloat16 s[8 * 64];
  __shared__ uint64_t full;
  if (threadIdx.x == 0) { init(&full, 1); fence_init(); }
  for (int i = threadIdx.x; i < 8 * 64; i += 64) x[i] = __float2bfloat16(i % 7);
  if (!FAULT) asm volatile("fence.proxy.async.global;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) { expect(&full, 1024); load_2d(s, &map, 0, 0, &full); }
  wait(&full, 0);
  for (int i = threadIdx.x; i < 8 * 64; i += 64) out[i] = s[i];
}"""
)


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", [0, 1])
def test_tensor_load_of_generic_writes(copies, seed, fault):
    x, out = np.zeros((8, 64), np.uint16), np.zeros((8, 64), np.uint16)
    map = encode_tiled(x, "bf16", (64, 8), (128,), (64, 8))
    module = load(compile_cuda(TENSOR, "sm_90a", [f"-DFAULT={fault}"]))
    if fault:
        with pytest.raises(EmulatorError, match="fence.proxy.async"):
            module.launch("kernel", block=64, args=[map, x, out], seed=seed, copies=copies)
    else:
        module.launch("kernel", block=64, args=[map, x, out], seed=seed, copies=copies)
        np.testing.assert_array_equal(out, x)


def test_bulk_store_read_before_its_wait():  # wait_group.read promises only that shared memory is free again
    check(
        PRELUDE
        + HEAD
        + """__shared__ alignas(128) int s[64];
  s[threadIdx.x] = in[threadIdx.x];
  fence_proxy();
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;" ::"l"(out), "r"(address(s)) : "memory");
    commit();
    if (FAULT) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    else wait_stores();
  }
  __syncthreads();
  s[threadIdx.x] = *(volatile int*)&out[threadIdx.x];  // FAULT HERE
}""",
        ["data race", "an asynchronous copy"],
        arch="sm_90a",
    )


def test_async_read_is_over_when_the_mbarrier_says_so():
    check(
        PRELUDE
        + HEAD
        + """__shared__ alignas(128) int s[64];
  __shared__ uint64_t full;
  if (threadIdx.x == 0) { init(&full, 1); fence_init(); }
  __syncthreads();
  if (threadIdx.x == 0) {
    expect(&full, 256);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];" ::"r"(address(s)), "l"(out), "r"(address(&full)) : "memory");
  }
  __syncthreads();
  if (!FAULT) wait(&full, 0);
  out[threadIdx.x] = in[threadIdx.x];  // FAULT HERE
  if (FAULT) wait(&full, 0);
}""",
        ["data race", "an asynchronous copy"],
        arch="sm_90a",
    )
