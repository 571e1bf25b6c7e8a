"""copies="late": a bulk load lands when a warp that waits for its mbarrier cannot go on without it, and no sooner."""

# ruff: noqa: E501 CUDA and PTX texts

import numpy as np
import pytest

from emulator import EmulatorError, compile_cuda, load
from emulator.hopper_kernels import PRELUDE

SEEDS = range(8)
TWO_LOADS = (
    PRELUDE
    + r"""
__device__ void bulk_load(void* s, const void* g, int bytes, uint64_t* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];" ::"r"(address(s)), "l"(g), "r"(address(b)), "r"(bytes) : "memory");
}
extern "C" __global__ void kernel(const float* in, float* out) {
  __shared__ alignas(128) float first[128], second[128];
  __shared__ uint64_t b[2];
  if (threadIdx.x == 0) {
    init(&b[0], 1);
    init(&b[1], 1);
    fence_init();
    expect(&b[0], 512);
    bulk_load(first, in, 512, &b[0]);
    expect(&b[1], 512);
    bulk_load(second, in + 128, 512, &b[1]);
  }
  __syncthreads();
  if (WAITS & 2) wait(&b[1], 0);
  if (WAITS & 4 && threadIdx.x >= 64) wait(&b[0], 0);  // others wait for the first load, the readers do not
  if (WAITS & 1) wait(&b[0], 0);
  if (threadIdx.x < 64) out[threadIdx.x] = first[threadIdx.x] + (WAITS & 2 ? second[threadIdx.x] : 0);
}
"""
)


def launch(waits, seed, **options):
    x, out = np.arange(256, dtype=np.float32), np.zeros(64, np.float32)
    module = load(compile_cuda(TWO_LOADS, "sm_90a", [f"-DWAITS={waits}"]))
    module.launch("kernel", block=128, args=[x, out], seed=seed, copies="late", **options)
    return out


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("check_races", [True, False])
@pytest.mark.parametrize("waits", [0, 2])  # for nothing, for the other load
def test_an_early_read_meets_a_copy_in_flight(waits, check_races, seed):
    with pytest.raises(EmulatorError, match="before the mbarrier wait of its copy"):
        launch(waits, seed, check_races=check_races)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_wait_of_another_warp_is_not_enough(seed):
    """It may have landed by then, but nothing orders the read behind it."""
    with pytest.raises(EmulatorError, match="before the mbarrier wait of its copy|data race"):
        launch(2 | 4, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_waited_for(seed):
    x = np.arange(256, dtype=np.float32)
    np.testing.assert_array_equal(launch(3, seed), x[:64] + x[128:192])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "body",
    [
        "if (lane == 0) wait(&b[0], 0); else READ",
        "if (lane) READ else wait(&b[0], 0);",
    ],
)
def test_lanes_that_do_not_wait_beside_lanes_that_do(body, seed):
    body = body.replace("READ", "out[threadIdx.x] = first[threadIdx.x];")
    source = TWO_LOADS[: TWO_LOADS.index("  if (WAITS & 2)")] + f"int lane = threadIdx.x % 32;\n{body}\n}}\n"
    with pytest.raises(EmulatorError, match="before the mbarrier wait of its copy"):
        module = load(compile_cuda(source, "sm_90a"))
        args = [np.zeros(256, np.float32), np.zeros(64, np.float32)]
        module.launch("kernel", block=64, args=args, seed=seed, copies="late")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("turn", ["", "out[2] += 1;"])  # what it does meanwhile
@pytest.mark.parametrize("spinner", [1, 64])  # a lane of the same warp, another warp
def test_lanes_that_spin_until_the_copy_has_landed(spinner, turn, seed):
    body = f"""  __shared__ int flag;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x == 0) {{
    wait(&b[0], 0);
    atomicExch(&flag, 1);
    out[0] = first[5];
  }} else if (threadIdx.x == {spinner}) {{
    while (atomicAdd(&flag, 0) == 0) {{ {turn} }}
    out[1] = 1;
  }}
}}
"""
    x, out = np.arange(256, dtype=np.float32), np.zeros(64, np.float32)
    module = load(compile_cuda(TWO_LOADS[: TWO_LOADS.index("  if (WAITS & 2)")] + body, "sm_90a"))
    undefined = "how often a loop turns until a copy lands" if "out[2]" in turn else ""
    module.launch("kernel", block=128, args=[x, out], seed=seed, copies="late", undefined=undefined)
    assert out[:2].tolist() == [5, 1]


STORE = (
    PRELUDE
    + r"""
extern "C" __global__ void kernel(float* out, int* seen) {
  __shared__ alignas(128) float s[32];
  s[threadIdx.x] = threadIdx.x;
  fence_proxy();
  __syncwarp();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 128;" ::"l"(out), "r"(address(s)) : "memory");
    commit();
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    seen[0] = ((volatile float*)out)[1];  // read is not written
    wait_stores();
    seen[1] = ((volatile float*)out)[1];
  }
}
"""
)


@pytest.mark.parametrize("copies, before", [("late", -5), ("early", 1)])
def test_stores_write_at_their_wait(copies, before):
    for seed in SEEDS:
        out, seen = np.full(32, -5, np.float32), np.zeros(2, np.int32)
        module = load(compile_cuda(STORE, "sm_90a"))
        # seen[0] is read while the store may still write, which is a race.
        module.launch(
            "kernel", args=[out, seen], seed=seed, copies=copies, check_races=False, undefined="when a store writes"
        )
        assert seen.tolist() == [before, 1]
        np.testing.assert_array_equal(out, np.arange(32))
