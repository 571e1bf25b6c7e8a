"""How the tests of public reports run cases and compare."""

from __future__ import annotations

import random
from typing import Any

import torch
from cases import Call, Case, by_group, random_case, run_on_rank
from ranks import run_ranks
from reference import assert_exact
from torch import Tensor

import ringattn_ext as ra

RANKS_TIMEOUT = 90.0
SIZES = [1, 2, 3, 4]


def check(P: int, case: Case, layout: str) -> None:
    """The case on P processes, against dense attention."""
    seed = random.randrange(2**30)
    answers = run_ranks(P, run_on_rank, case, seed, Call(layout), timeout=RANKS_TIMEOUT)
    ((_, result),) = by_group(case, layout, answers).items()
    assert_exact(result, case.tensors(seed), case.mask, case.scale, (case, P, layout))


def small_case(kind: str, **fields: Any) -> Case:
    return random_case(kind, **({"D": random.choice((4, 8, 40)), "dtype": torch.float64} | fields))


def packed(*lengths: int, **fields: Any) -> Case:
    """Documents of these lengths."""
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return Case(S=bounds[-1], cu_seqlens=tuple(bounds), **fields)


def own_part(case: Case, tensors: tuple[Tensor, ...], layout: str) -> list[Tensor]:
    """This rank's tokens of whole tensors."""
    own = ra.positions(case.S, layout=layout)
    return [t[:, :, own].contiguous() for t in tensors]


def assert_close(got: Tensor, wanted: Tensor, what: object = "", tolerance: float = 1e-10) -> None:
    """The norm of the difference, relative to that of what is wanted, or of ones where that is smaller."""
    got, wanted = got.detach().double(), wanted.detach().double()
    assert got.shape == wanted.shape, (what, got.shape, wanted.shape)
    difference, size = float((got - wanted).norm()), max(float(wanted.norm()), wanted.numel() ** 0.5)
    assert difference <= tolerance * size, (what, difference, size)
