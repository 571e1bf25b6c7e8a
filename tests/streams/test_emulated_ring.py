"""A whole ring of real launches: ring_attention plans them, the emulator executes their PTX, dense attention judges."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from emulator.compile import find_nvcc

from .case_runs import RingRun, check_result, run_virtual
from .emulated import emulated_kernels
from .machine import fresh, history
from .worker import on_the_machine

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc")

P = 3
bf16, fp16 = torch.bfloat16, torch.float16
CASES = {
    "zigzag causal": ("zigzag", Case(1, 2, 1, 420, D=64, dtype=bf16, is_causal=True)),
    "contiguous full": ("contiguous", Case(1, 1, 1, 330, D=128, dtype=fp16)),
    "striped documents": (
        "striped",
        Case(1, 2, 2, 220, D=64, dtype=fp16, is_causal=True, cu_seqlens=(0, 31, 31, 190, 220)),
    ),
    "contiguous documents": ("contiguous", Case(2, 1, 1, 97, D=128, dtype=bf16, cu_seqlens=(0, 5, 60, 97))),
    "zigzag window": ("zigzag", Case(1, 1, 1, 120, D=72, dtype=bf16, window=(40, 10))),
}  # fmt: skip


@pytest.mark.parametrize("deterministic", (True, False))
@pytest.mark.parametrize("name", CASES)
@on_the_machine
def test_ring_of_launches(name: str, deterministic: bool) -> None:
    layout, case = CASES[name]
    fresh()
    one = RingRun(case, P, layout, options={"deterministic": deterministic})
    with emulated_kernels() as launched:
        got = one.run()
    one.check(got)
    assert not history().problems, history().problems[:5]
    kinds = {"forward", "delta", "backward_keys", *(["backward_queries"] if deterministic else [])}
    assert {kernel.split("_", 1)[1].rsplit("_", 2 if "delta" not in kernel else 1)[0] for kernel in launched} == kinds


@on_the_machine
def test_virtual_ranks() -> None:
    layout, case = CASES["zigzag causal"]
    fresh()
    tensors = case.tensors(torch.randint(2**31, ()).item())
    with emulated_kernels():
        got = run_virtual(case, P, layout, tensors)
    check_result(case, tensors, got, case)
    assert not history().problems, history().problems[:5]
