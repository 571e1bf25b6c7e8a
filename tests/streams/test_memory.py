"""How much memory a ring takes beside its inputs, to the byte, whatever the number of ranks."""

from __future__ import annotations

import time

import pytest
import torch
from cases import LAYOUTS, Case

import ringattn_ext as ra

from .case_runs import RingRun
from .machine import Rank, fresh, native, run_ring
from .worker import on_the_machine

S_LOCAL = 24  # the same on every rank
HALF, FLOAT = 2, 4  # bytes


def settles(device: int, expected: int) -> bool:
    """What a backward pass held is freed by a thread of autograd, perhaps a moment after the pass."""
    deadline = time.monotonic() + 10
    while native.usage(device)[0] != expected and time.monotonic() < deadline:
        time.sleep(0.001)
    return native.usage(device)[0] == expected


def peaks(one: RingRun, workspace: int) -> list[tuple[int, int, int]]:
    """On each device: the peak of a forward pass, the peak of it and its backward pass, what the second calls add."""

    def body(rank: Rank) -> tuple[int, int, int]:
        tensors = one.inputs(rank)
        for t in tensors[:3]:
            t.requires_grad_()
        before = native.usage(rank.rank)[0]
        found = one.attend(rank, tensors)
        forward = native.usage(rank.rank)[1] - before
        gradients = torch.autograd.grad(found, tensors[:3], tensors[3:])
        both = native.usage(rank.rank)[1] - before
        del found, gradients
        assert settles(rank.rank, before + workspace)
        found = one.attend(rank, tensors)
        gradients = torch.autograd.grad(found, tensors[:3], tensors[3:])
        more = native.usage(rank.rank)[1] - before - both
        del found, gradients
        assert settles(rank.rank, before + workspace)
        ra.release_workspace(rank.group)
        assert settles(rank.rank, before)
        return forward, both, more

    fresh()
    return run_ring(one.P, body)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_the_machine
def test_memory_of_a_pass_does_not_depend_on_the_number_of_ranks(layout: str) -> None:
    for P in range(2, 9):
        case = Case(2, 4, 2, S_LOCAL * P, D=16, dtype=torch.bfloat16, is_causal=True)
        queries, keys = case.B * case.Hq * S_LOCAL * case.D, case.B * case.Hkv * S_LOCAL * case.D
        rows = case.B * case.Hq * S_LOCAL
        block = 2 * HALF * keys
        results = HALF * queries + FLOAT * rows + block  # out, lse, and the block that is kept for backward
        state = FLOAT * (queries + 2 * rows)
        gradients = HALF * (queries + 2 * keys)
        workspace = 2 * block + 3 * (2 * FLOAT * keys) + FLOAT * queries + 3 * FLOAT * rows
        for forward, both, more in peaks(RingRun(case, P, layout), workspace):
            assert forward == results + block + state, P
            assert both == results + workspace + gradients, P
            assert more == 0, P
