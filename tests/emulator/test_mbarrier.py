"""mbarriers: planted faults, and lanes of one warp that wait for each other."""

# ruff: noqa: E501 CUDA and PTX texts

import numpy as np
import pytest

from emulator import compile_cuda, load
from emulator.hopper_kernels import PRELUDE
from emulator.test_faults import HEAD, check


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


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    "body",
    [
        "if (t == 0) { wait(&b, 0); out[0] = 1; } else { arrive(&b); out[t] = 2; }",
        "if (t == 0) { wait(&b, 0); out[0] = 1; return; } arrive(&b); out[t] = 2;",
        "if (t == 0) { wait(&b, 0); out[0] = 1; } else if (t == 31) { wait(&b, 0); out[31] = 1; } else { arrive(&b); out[t] = 2; }",
    ],
)
def test_lanes_that_wait_for_lanes_of_their_warp(body, seed):
    waiting = 2 if "31" in body else 1
    source = f"""extern "C" __global__ void kernel(int* out) {{
  __shared__ uint64_t b;
  int t = threadIdx.x;
  if (t == 0) init(&b, {32 - waiting});
  __syncthreads();
  {body}
}}
"""
    out = np.zeros(32, np.int32)
    load(compile_cuda(PRELUDE + source, "sm_90a")).launch("kernel", args=[out], seed=seed)
    assert out.tolist() == [1, *[2] * 30, 3 - waiting]
