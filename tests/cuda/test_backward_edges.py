"""Backward where it is easy to be wrong: rows, keys and tiles without a visible pair, extreme scores, no tokens,
offsets beyond 2^31."""

from __future__ import annotations

import itertools
import math
import mmap
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import Case
from torch import Tensor

from .backward_cases import Backward, Gradients, check
from .block import NAMES
from .ring import random_device
from .tensors import assert_same

DTYPES = tuple(NAMES)
MODES = pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "atomic"])


def any_seed() -> int:
    return random.randrange(2**31)


def any_backward(case: Case, deterministic: bool, tensors: tuple[Tensor, ...] | None = None, **given: Any) -> Backward:
    return Backward(case, tensors or case.tensors(any_seed()), random_device(), deterministic, **given)


# --- nothing to see -------------------------------------------------------------------------------------------------


@MODES
def test_causal_with_any_two_lengths(deterministic: bool) -> None:
    for S, Skv in itertools.product((1, 7, 64, 65, 130), repeat=2):
        case = Case(
            Hq=2, Hkv=1, S=S, Skv=Skv, D=random.choice((40, 64, 128)), dtype=random.choice(DTYPES), is_causal=True
        )
        one = any_backward(case, deterministic)
        check(one, one.whole())


@MODES
@pytest.mark.parametrize("D", [64, 128, 256])
def test_rows_that_see_nothing(D: int, deterministic: bool) -> None:
    """Causal queries from 0 on, keys from `first` on: rows of one tile, and whole tiles, see nothing at all."""
    for first in random.sample((1, 70, 128, 200), 2):
        case = Case(Hq=2, Hkv=1, S=300, D=D, dtype=random.choice(DTYPES), is_causal=True)
        q, k, v, grad_out, _ = case.tensors(any_seed())
        mask = case.mask[:, first:]
        one = any_backward(case, deterministic, (q, k[:, :, first:], v[:, :, first:], grad_out), mask=mask)
        assert bool((one.statistics[0][:, :, :first] == -math.inf).all())
        got = one.zeros()
        one.add(one.tensors[:4], ([(0, 1, 300)], [(first, 1, 300 - first)]), got)
        check(one, got, first)
        start = torch.randn(got.dq.shape)
        again = one.zeros()._replace(dq=start.clone())
        one.add(one.tensors[:4], ([(0, 1, 300)], [(first, 1, 300 - first)]), again)
        assert_same(again.dq[:, :, :first], start[:, :, :first])


@MODES
@pytest.mark.parametrize("D", [64, 128, 256])
def test_blocks_without_a_visible_pair_leave_everything_alone(D: int, deterministic: bool) -> None:
    """No byte is written, nor is any of the inputs, all NaN, read."""
    case = Case(S=260, Skv=520, D=D, dtype=random.choice(DTYPES), is_causal=True)
    one = any_backward(case, deterministic)
    one.statistics = tuple(torch.full_like(t, torch.nan) for t in one.statistics)
    poison = torch.full_like(one.tensors[0], torch.nan)
    starts = [torch.randn(1, 2, 260, D) for _ in range(3)]
    got = Gradients(*(t.clone() for t in starts))
    one.add((poison,) * 4, ([(0, 1, 260)], [(260, 1, 260)]), got)
    for a, b in zip(got, starts, strict=True):
        assert_same(a, b)
    assert all(r.global_write.bytes == 0 and r.matrix_flops == 0 for r in one.reports) and one.reports


@MODES
def test_no_tokens(deterministic: bool) -> None:
    for fields in ({"S": 0, "Skv": 8}, {"S": 8, "Skv": 0}, {"S": 0}, {"B": 0}):
        case = Case(**{"D": 64, "dtype": random.choice(DTYPES), **fields})
        one = any_backward(case, deterministic)
        starts = [torch.randn(t.shape) for t in one.zeros()]
        got = one.whole(Gradients(*(t.clone() for t in starts)))
        assert one.reports == [], "launches for nothing"
        for a, b in zip(got, starts, strict=True):
            assert_same(a, b)


# --- numbers --------------------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_huge_scores(size: float, deterministic: bool) -> None:
    """Scores around +-1e4 before scaling, whose softmax is one key, or a few."""
    for D, order in ((64, "rising"), (64, "falling"), (128, "random"), (256, "random")):
        case = Case(S=200, D=D, dtype=random.choice(DTYPES), is_causal=random.random() < 0.5)
        q, k, v, *rest = case.tensors(any_seed())
        # One column makes the large part of the scores, the same for all queries, in steps that the type can hold.
        steps = torch.arange(200).double() if order != "random" else torch.randperm(200).double()
        steps = steps.flip(0) if order == "falling" else steps
        big = math.sqrt(abs(size))
        q[..., 0] = math.copysign(big, size)
        k[..., 0] = big * (1 + steps / 256).to(case.dtype)
        one = any_backward(case, deterministic, (q, k, v, *rest))
        largest = float((q.double() @ k.double().transpose(2, 3)).abs().max())
        check(one, one.whole(), (size, order), noise=8 * 2**-24 * largest * D**-0.5)


@MODES
def test_scales(deterministic: bool) -> None:
    for scale in (1e-4, 0.3, 10.0):
        case = Case(
            Hq=2, Hkv=1, S=129, D=random.choice((64, 128)), dtype=random.choice(DTYPES), is_causal=True, scale=scale
        )
        one = any_backward(case, deterministic)
        check(one, one.whole(), noise=8 * 2**-24 * 40 * scale)


@MODES
def test_keys_past_the_end_have_no_part(deterministic: bool) -> None:
    """All real scores lie far below 0, the score of a key that is not there would be 0."""
    for Skv in (1, 63, 65):
        case = Case(S=70, Skv=Skv, D=64, dtype=random.choice(DTYPES))
        q, k, v, *rest = case.tensors(any_seed())
        q[..., 0], k[..., 0] = 20.0, -20.0
        one = any_backward(case, deterministic, (q, k, v, *rest))
        check(one, one.whole(), noise=1e-4)


# --- offsets --------------------------------------------------------------------------------------------------------


def spread(x: Tensor, dimension: int) -> Tensor:
    """x in memory of which only the pages that are touched exist; along one dimension offsets exceed 2^31 elements."""
    size = 3 * 2**30 * x.element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        room = mmap.mmap(-1, size, flags=flags)
    except OSError as refusal:
        pytest.skip(f"{size} bytes of address space: {refusal}")
    strides = [0, 0, 0, 1]
    small = x.shape[3]
    for d in range(3):
        if d != dimension:
            strides[d] = small
            small *= x.shape[d]
    strides[dimension] = (2**31 + 2**29) // (x.shape[dimension] - 1) // 8 * 8
    view = torch.as_strided(torch.from_numpy(np.frombuffer(room, np.uint8)).view(x.dtype), x.shape, strides)
    assert sum(s * (n - 1) for s, n in zip(strides, x.shape, strict=True)) > 2**31
    return view.copy_(x)


@MODES
@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_strides_beyond_int32(dimension: int, deterministic: bool) -> None:
    case = Case(B=2, Hq=2, Hkv=2, S=70, D=random.choice((64, 256)), dtype=random.choice(DTYPES), is_causal=True)
    one = any_backward(case, deterministic)
    got = Gradients(*(spread(t, dimension) for t in one.zeros()))
    local = tuple(spread(t, dimension) for t in one.tensors[:4])
    one.add(local, ([(0, 1, 70)], [(0, 1, 70)]), got)
    check(one, got)


def test_positions_near_the_largest() -> None:
    """Tokens at the end of a sequence of 2^31 - 1."""
    last = 2**31 - 1
    for stride in (1, 64):
        first = last - 130 * stride
        case = Case(Hq=1, Hkv=1, S=130, D=64, dtype=random.choice(DTYPES), is_causal=True)
        one = any_backward(case, random.random() < 0.5)
        one.case = replace(case, Skv=last)
        got = one.zeros()
        segments = [(first, stride, 130)]
        one.add(one.tensors[:4], (segments, segments), got, one.statistics)
        check(one, got, stride)
