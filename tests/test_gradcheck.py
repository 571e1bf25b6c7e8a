"""Finite differences in float64: of virtual rings, and of whole tensors -> shard -> ring -> unshard on processes."""

from __future__ import annotations

import random

import pytest
import torch
from cases import LAYOUTS, MASKS, Case, random_mask
from ranks import run_ranks
from torch.autograd import gradcheck

import ringattn_ext as ra

pytestmark = pytest.mark.timeout(120)


def small_case(kind: str) -> Case:
    S = random.randint(3, 7)
    Hkv, groups = random.choice(((1, 1), (1, 2), (2, 1)))
    return Case(S=S, D=random.choice((1, 2, 3)), Hq=Hkv * groups, Hkv=Hkv, **random_mask(kind, S))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("P", [1, 2, 3])
def test_virtual(P: int, kind: str) -> None:
    case, layout = small_case(kind), random.choice(LAYOUTS)

    def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ra.virtual_ring_attention(*inputs, world_size=P, layout=layout, return_lse=True, **case.options())

    inputs = [t.requires_grad_() for t in case.tensors(random.randrange(2**31))[:3]]
    assert gradcheck(function, inputs), (case, layout)


@pytest.mark.parametrize("P", [1, 2, 3])
def test_virtual_cross(P: int) -> None:
    case = Case(S=4, Skv=random.randint(1, 6), D=2, Hkv=1)
    inputs = [t.requires_grad_() for t in case.tensors(random.randrange(2**31))[:3]]
    assert gradcheck(lambda *x: ra.virtual_ring_attention(*x, world_size=P, enable_gqa=True, return_lse=True), inputs)


def check_global_function(case: Case, layout: str, seed: int) -> bool:
    """The loss is the same on every rank, so unshard's backward takes a part and shard's puts the parts together."""

    def function(*whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = [ra.shard(x, 2, layout=layout) for x in whole]
        out, lse = ra.ring_attention(
            *parts, layout=layout, seq_len=case.S, key_seq_len=case.key_len, return_lse=True, **case.options()
        )
        return tuple(ra.unshard(x, 2, layout=layout, seq_len=case.S) for x in (out, lse))

    inputs = [t.requires_grad_() for t in case.tensors(seed)[:3]]
    return gradcheck(function, inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [*MASKS, "cross"])
def test_processes(kind: str, layout: str) -> None:
    case = Case(S=5, Skv=3, D=2, Hkv=1) if kind == "cross" else small_case(kind)
    assert run_ranks(2, check_global_function, case, layout, random.randrange(2**31)) == [True, True]
