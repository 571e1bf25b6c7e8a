"""Backward of a ring on the emulated GPU: head_dims x masks x layouts x lengths x groups, with and without atomics.

Drawn anew in every run. A case takes every rank's queries against every block of keys, in any order, with NaN around
all that is read and accumulators that are not zero. The expected result is dense and in float64; the allowed error that
of others.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import LAYOUTS, MASKS, Case, random_mask
from torch import Tensor

from ringattn_ext._C import Layout

from .backward_cases import ACCUMULATORS, Backward, Gradients, check
from .block import NAMES, Device
from .ring import random_device
from .tensors import STRIDES, assert_same, place, place_expanded

HEAD_DIMS = (8, 40, 64, 72, 80, 96, 128, 160, 192, 256)
LENGTHS = (1, 63, 64, 65, 127, 129, 200)
GROUPS = (1, 2, 3, 4, 8)
DTYPES = tuple(NAMES)
MODES = pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "atomic"])


def draw(kind: str, **fields: object) -> Case:
    S = fields.pop("S", None) or random.choice(LENGTHS)
    Hkv = random.choice((1, 1, 2))
    case = Case(
        **{"Hq": Hkv * random.choice(GROUPS[:4]), "Hkv": Hkv, "S": S, "D": 64, **random_mask(kind, S), **fields}
    )
    return replace(case, B=2) if case.Hq * case.S * case.D < 10_000 else case


def any_seed() -> int:
    return random.randrange(2**31)


def any_layout(S: int, kind: str | None = None, most: int = 4) -> Layout:
    return Layout(kind or random.choice(LAYOUTS), random.randint(1, most), S)


def any_backward(case: Case, deterministic: bool, tensors: tuple[Tensor, ...] | None = None, **given: Any) -> Backward:
    drawn = {"device": random_device(), "strides": random.choice(STRIDES), "accumulators": random.choice(ACCUMULATORS)}
    return Backward(case, tensors or case.tensors(any_seed()), deterministic=deterministic, **(drawn | given))


@MODES
@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_dims(dtype: torch.dtype, D: int, deterministic: bool) -> None:
    case = draw(random.choice(MASKS), D=D, dtype=dtype)
    layout = any_layout(case.S)
    one = any_backward(case, deterministic)
    check(one, one.ring(layout), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MASKS)
def test_masks_and_layouts(kind: str, layout: str) -> None:
    case = draw(kind, D=random.choice((64, 72, 128)), dtype=random.choice(DTYPES))
    ring = any_layout(case.S, layout)
    one = any_backward(case, random.random() < 0.5, strides="transposed")
    check(one, one.ring(ring), ring)


@MODES
@pytest.mark.parametrize("S", LENGTHS)
def test_lengths(S: int, deterministic: bool) -> None:
    for Skv in (None, random.choice(LENGTHS)):
        kind = "full" if Skv else random.choice(MASKS)
        case = draw(kind, S=S, Skv=Skv, D=random.choice(HEAD_DIMS[:7]), dtype=random.choice(DTYPES))
        one = any_backward(case, deterministic)
        check(one, one.whole(), "one call")


@MODES
@pytest.mark.parametrize("group", GROUPS)
def test_groups(group: int, deterministic: bool) -> None:
    for Hkv in random.sample((1, 2, 3), 2):
        fields = {"dtype": random.choice(DTYPES), "is_causal": random.random() < 0.5}
        case = Case(Hq=Hkv * group, Hkv=Hkv, S=random.choice((70, 130)), D=random.choice((64, 128)), **fields)
        one = any_backward(case, deterministic)
        check(one, one.whole())


@pytest.mark.parametrize("D", HEAD_DIMS)
def test_slices_of_one_tensor(D: int) -> None:
    """q, k and v are slices of [B, S, 3, H, D], as a fused projection gives them."""
    case = Case(B=2, Hq=2, Hkv=2, S=random.choice((33, 70)), D=D, dtype=random.choice(DTYPES), is_causal=True)
    one = any_backward(case, random.random() < 0.5)
    q, k, v, grad_out, _ = one.tensors
    packed = torch.stack([q, k, v], dim=3).transpose(1, 2).contiguous()  # [B, S, H, 3, D]
    views = [packed[:, :, :, i].transpose(1, 2) for i in range(3)]
    got = one.zeros()
    one.add((*views, place(grad_out, "shifted")), ([(0, 1, case.S)], [(0, 1, case.S)]), got)
    check(one, got)


@pytest.mark.parametrize("D", [64, 72, 128, 256])
def test_expanded_tensors(D: int) -> None:
    """Strides of 0: one head for all, and a grad_out that is the same for every token."""
    case = Case(B=2, Hq=4, Hkv=2, S=random.choice((33, 70)), D=D, dtype=random.choice(DTYPES), is_causal=True)
    for deterministic in (True, False):
        q, k, v, grad_out, _ = case.tensors(any_seed())
        tensors = (q, place_expanded(k), place_expanded(v), grad_out[:1, :1, :1].expand(q.shape))
        one = any_backward(case, deterministic, tensors)
        got = one.zeros()
        one.add(tensors, ([(0, 1, case.S)], [(0, 1, case.S)]), got)
        check(one, got)


@MODES
@pytest.mark.parametrize("D", [40, 64, 128, 256])
def test_sums_go_on_from_what_is_there(D: int, deterministic: bool) -> None:
    case = draw("causal", S=130, D=D, dtype=random.choice(DTYPES))
    one = any_backward(case, deterministic)
    part = one.whole()
    starts = [torch.randn(t.shape) * 3 for t in part]
    sums = one.whole(Gradients(*(t.clone() for t in starts)))
    for total, start, addend in zip(sums, starts, part, strict=True):
        torch.testing.assert_close(total, start + addend, rtol=1e-6, atol=1e-5)


@MODES
@pytest.mark.parametrize("D", [64, 128, 256])
def test_gradients_that_nobody_wants(D: int, deterministic: bool) -> None:
    case = draw(random.choice(MASKS), S=129, D=D, dtype=random.choice(DTYPES))
    one = any_backward(case, deterministic)
    every = one.whole()
    check(one, every)
    for wanted in [(i >> 2 & 1, i >> 1 & 1, i & 1) for i in range(8)]:
        one.reports.clear()
        start = [t if wants else None for t, wants in zip(one.zeros(), wanted, strict=True)]
        got = one.whole(Gradients(*start))
        by_keys, by_queries = any(wanted[1:]), wanted[0] and (deterministic or not any(wanted[1:]))
        assert len(one.reports) == by_keys + by_queries, wanted
        for a, b, name in zip(got, every, got._fields, strict=True):
            if a is not None and (name != "dq" or deterministic):
                assert_same(a, b, (wanted, name))
            elif a is not None:
                torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("D", [64, 128, 256])
def test_every_schedule_gives_the_same_bits(D: int) -> None:
    """All gradients where the caller asks for it; dK and dV always."""
    case = draw("causal_documents", S=150, D=D, dtype=random.choice(DTYPES), Hq=2, Hkv=1)
    tensors = case.tensors(any_seed())
    for arch in (80, 89):
        for deterministic in (True, False):
            first = None
            for copies in ("early", "late", "random"):
                for seed in range(5) if deterministic else (0, 1, 4):
                    device = Device(arch, copies, seed)
                    got = Backward(case, tensors, device, deterministic).whole()
                    first = first or got
                    for a, b in list(zip(got, first, strict=True))[not deterministic :]:
                        assert_same(a, b, (case, device))


@pytest.mark.parametrize("arch", [90, 120])
def test_other_architectures(arch: int) -> None:
    for D in (64, 128, 256):
        case = draw(random.choice(MASKS), S=130, D=D, dtype=torch.bfloat16)
        for deterministic in (True, False):
            one = any_backward(case, deterministic, device=random_device((arch,)))
            check(one, one.whole())


@MODES
def test_more_tiles_than_a_warp_looks_at(deterministic: bool) -> None:
    """Long sequences whose mask leaves work in few of their tiles: more than 32 tiles, most of them skipped."""
    S, block = 5000, slice(4100, 4300)
    for fields in ({"window": (40, 30)}, {"cu_seqlens": (0, 4100, 4200, S)}):
        case = Case(S=S, D=64, Hq=2, Hkv=1, dtype=torch.bfloat16, **fields)
        q, k, v, grad_out, _ = case.tensors(any_seed())
        # All queries against the block; the statistics of those that see nothing of it do not matter.
        mask = case.mask[:, block]
        sees = mask.any(1)
        tensors = (q[:, :, sees], k[:, :, block], v[:, :, block], grad_out[:, :, sees])
        one = any_backward(case, deterministic, tensors, mask=mask[sees])
        statistics = torch.randn(2, 1, 2, S)
        statistics[:, :, :, sees] = torch.stack(one.statistics)
        got = Gradients(torch.zeros(q.shape), *one.zeros()[1:])
        one.add((q, *tensors[1:3], grad_out), ([(0, 1, S)], [(4100, 1, 200)]), got, tuple(statistics))
        assert bool((got.dq[:, :, ~sees] == 0).all())
        check(one, got._replace(dq=got.dq[:, :, sees]))
        # The block's queries against all keys.
        mask = case.mask[block]
        seen = mask.any(0)
        tensors = (q[:, :, block], k[:, :, seen], v[:, :, seen], grad_out[:, :, block])
        one = any_backward(case, deterministic, tensors, mask=mask[:, seen])
        got = Gradients(one.zeros().dq, torch.zeros(k.shape), torch.zeros(v.shape))
        one.add((tensors[0], k, v, tensors[3]), ([(4100, 1, 200)], [(0, 1, S)]), got, one.statistics)
        assert bool((got.dk[:, :, ~seen] == 0).all()) and bool((got.dv[:, :, ~seen] == 0).all())
        check(one, Gradients(got.dq, got.dk[:, :, seen], got.dv[:, :, seen]))
