"""Planted faults: each must be found, at the right source line, and its repaired twin must pass silently."""

# ruff: noqa: E501 CUDA and PTX texts

import re

import numpy as np
import pytest

from emulator import EmulatorError, compile_cuda, load


def check(source, words, shared_bytes=0, block=64, grid=1, arch="sm_80", out=64, seeds=(0, 1, 2), **options):
    """Compiles with and without -DFAULT. The fault must be reported with the words, at the line that says FAULT HERE."""
    for fault in (False, True):
        module = load(compile_cuda(source, arch=arch, options=["-DFAULT=1"] if fault else ["-DFAULT=0"]))
        for seed in seeds:
            arrays = [np.arange(out, dtype=np.int32), np.zeros(out, np.int32)]
            launch = dict(grid=grid, block=block, shared_bytes=shared_bytes, args=arrays, seed=seed, **options)
            if not fault:
                module.launch("kernel", **launch)
                continue
            with pytest.raises(EmulatorError) as caught:
                module.launch("kernel", **launch)
            text = str(caught.value)
            assert all(word in text for word in words), text
            lines = [i + 1 for i, line in enumerate(source.split("\n")) if "FAULT HERE" in line]
            if lines:
                found = re.findall(r"kernel\.cu:(\d+)", text)
                assert any(int(one) in lines for one in found), text


HEAD = 'extern "C" __global__ void kernel(const int* in, int* out) {\n'


def test_missing_barrier():
    check(
        HEAD
        + """__shared__ int s[64];
  s[63 - threadIdx.x] = 0;
  __syncthreads();
  s[threadIdx.x] = in[threadIdx.x];  // FAULT HERE, whichever comes second
  if (!FAULT) __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x];  // FAULT HERE
}""",
        ["data race"],
    )


def test_unwritten_shared():
    check(
        HEAD
        + """__shared__ int s[64];
  if (threadIdx.x < 64 - FAULT) s[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x];  // FAULT HERE
}""",
        ["unwritten", "warp 0", "lanes 0"],
    )


def test_global_out_of_bounds():
    check(
        HEAD + "  out[threadIdx.x + FAULT] = in[threadIdx.x];  // FAULT HERE\n}",
        ["out of bounds", "warp 1, lanes 31", "argument 1"],
    )


def test_global_out_of_bounds_read():
    check(
        HEAD + "  out[threadIdx.x] = in[threadIdx.x - FAULT];  // FAULT HERE\n}",
        ["out of bounds", "warp 0, lanes 0", "argument 0"],
    )


def test_shared_out_of_bounds():
    check(
        HEAD
        + """extern __shared__ int s[];
  s[threadIdx.x + FAULT] = in[threadIdx.x];  // FAULT HERE
  out[threadIdx.x] = s[threadIdx.x + FAULT];
}""",
        ["out of bounds", "shared", "warp 1, lanes 31"],
        shared_bytes=256,
        seeds=(0,),
    )


def test_local_out_of_bounds():
    check(
        HEAD
        + """int local[16];
  for (int i = 0; i < 16; ++i) local[i] = in[i];
  out[threadIdx.x] = local[(in[threadIdx.x] & 15) + 16 * FAULT * in[1]];  // FAULT HERE
}""",
        ["out of bounds", "local"],
    )


def test_misaligned_global():
    check(
        HEAD
        + "  *(int2*)(out + (threadIdx.x & 62) + FAULT * (threadIdx.x == 3)) = make_int2(1, in[0]);  // FAULT HERE\n}",
        ["misaligned", "lanes 3"],
    )


def test_misaligned_shared():
    check(
        HEAD
        + """__shared__ alignas(16) int s[132];
  if (threadIdx.x < 32) *(int4*)(s + 4 * threadIdx.x + FAULT) = make_int4(1, 2, 3, in[0]);  // FAULT HERE
}""",
        ["misaligned", "shared"],
    )


def test_barrier_in_diverged_code():
    check(
        HEAD
        + """if (FAULT) { if (threadIdx.x < 48)
    __syncthreads();  // FAULT HERE
  } else __syncthreads();
  out[threadIdx.x] = in[threadIdx.x];
}""",
        ["barrier", "diverged"],
    )


def test_named_barrier_with_a_wrong_count():
    check(
        HEAD
        + """if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;" ::: "memory");
  else asm volatile("bar.sync 1, %0;" :: "r"(FAULT ? 96 : 64) : "memory");
  out[threadIdx.x] = in[threadIdx.x];
}""",
        ["barrier 1", "wrong count"],
        block=64,
    )


def test_deadlock():
    check(
        HEAD
        + """if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;" ::: "memory");
  else asm volatile("bar.sync %0, 64;" :: "r"(FAULT ? 2 : 1) : "memory");
  out[threadIdx.x] = in[threadIdx.x];
}""",
        ["deadlock", "barrier 1", "barrier 2", "warp 0", "warp 1"],
    )


def test_missing_lanes():
    check(
        HEAD
        + """int x = in[threadIdx.x];
  if (!FAULT || threadIdx.x % 32 < 20)
    x = __shfl_xor_sync(FAULT ? ~0u : ~0u, x, 1);  // FAULT HERE
  out[threadIdx.x] = x;
}""",
        ["missing lanes"],
    )


def test_shared_limit():
    module = load(
        compile_cuda(
            HEAD + "extern __shared__ int s[]; s[threadIdx.x] = 1; out[0] = s[threadIdx.x] + in[0]; }", "sm_86"
        )
    )
    x = np.zeros(64, np.int32)
    module.launch("kernel", shared_bytes=99 * 1024, args=[x, x])
    with pytest.raises(EmulatorError, match="shared memory"):
        module.launch("kernel", shared_bytes=99 * 1024 + 16, args=[x, x])


def test_unknown_instruction_quotes_its_line():
    ptx = compile_cuda(HEAD + "  out[0] = in[0] * 3;\n}")
    broken = ptx.replace("mul.lo.s32", "mul.frobnicate.s32")
    assert broken != ptx
    with pytest.raises(EmulatorError, match=r"PTX line \d+: .*mul.frobnicate"):
        load(broken)


def test_race_between_read_and_write():
    check(
        HEAD
        + """__shared__ int s[64];
  s[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  int x = s[63 - threadIdx.x];  // FAULT HERE
  if (!FAULT) __syncthreads();
  s[threadIdx.x] = x + 1;  // FAULT HERE
  out[threadIdx.x] = s[threadIdx.x];
}""",
        ["data race"],
    )


def test_misaligned_local():
    check(
        HEAD
        + """alignas(8) int local[16];
  for (int i = 0; i < 16; ++i) local[i] = in[i];
  long long x = *(volatile long long*)(local + (in[threadIdx.x] & 6) + FAULT * in[1]);  // FAULT HERE
  out[threadIdx.x] = (int)x;
}""",
        ["misaligned", "local"],
    )


def test_exited_lanes_in_a_mask():
    check(
        HEAD
        + """if (FAULT && threadIdx.x % 32 == 5) return;
  out[threadIdx.x] = __shfl_xor_sync(~0u, in[threadIdx.x], 1);  // FAULT HERE
}""",
        ["missing lanes"],
    )


def test_trap_and_assertion():
    check(HEAD + "  if (FAULT && in[threadIdx.x] == 40) __trap();  // FAULT HERE\n}", ["trap", "warp 1, lanes 8"])


def test_limit():  # a loop that counts never comes back to a state that it had
    check(
        HEAD + "  int n = 0;\n  if (FAULT) while (((volatile int*)in)[0] == 0) ++n;\n  out[threadIdx.x] = n;\n}",
        ["deadlock", "still running after 100000"],
        limit=100000,
    )
