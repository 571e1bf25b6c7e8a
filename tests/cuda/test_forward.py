"""Forward of one rank of a ring on the emulated GPU: head_dims x masks x layouts x lengths x groups x cuts into calls.

Drawn anew in every run. Each case takes the blocks of all ranks in random order, in pieces that are cut anywhere, and
starts from memory full of NaN. The expected result is dense and in float64; the allowed error that of others.
"""

from __future__ import annotations

import random

import pytest
import torch
from cases import LAYOUTS, MASKS, Case, random_mask

from ringattn_ext._C import Layout

from .block import NAMES
from .ring import Pass, check_pass, check_rank, mask_fields, random_device
from .tensors import STRIDES, assert_same, place, place_expanded

HEAD_DIMS = (8, 40, 64, 72, 80, 96, 128, 160, 192, 256)
LENGTHS = (1, 63, 64, 65, 127, 129, 191, 200, 256)
GROUPS = (1, 2, 3, 4, 8)
DTYPES = tuple(NAMES)


def draw(kind: str, **fields: object) -> Case:
    """A case with that mask; heads so that it is neither tiny nor long."""
    S = fields.pop("S", None) or random.choice(LENGTHS)
    Hkv = random.choice((1, 1, 2))
    group = random.choice(GROUPS)
    case = Case(**{"Hq": Hkv * group, "Hkv": Hkv, "S": S, "D": 64, **random_mask(kind, S), **fields})
    few = case.Hq * case.S * case.D < 10_000
    return Case(**{**vars(case), "B": 2}) if few else case


def any_layout(kind: str, S: int, most: int = 4) -> tuple[Layout, int]:
    P = random.randint(1, most)
    return Layout(kind, P, S), random.randrange(P)


def any_seed() -> int:
    return random.randrange(2**31)


@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_dims(dtype: torch.dtype, D: int) -> None:
    for kind in random.sample(MASKS, 3):
        case = draw(kind, D=D, dtype=dtype)
        layout, rank = any_layout(random.choice(LAYOUTS), case.S)
        check_rank(case, case.tensors(any_seed()), layout, rank, random_device(), random.choice(STRIDES))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MASKS)
def test_masks_and_layouts(kind: str, layout: str) -> None:
    for P in random.sample((1, 2, 3, 4), 2):
        case = draw(kind, D=random.choice((64, 72, 128)), dtype=random.choice(DTYPES))
        ring = Layout(layout, P, case.S)
        check_rank(case, case.tensors(any_seed()), ring, random.randrange(P), random_device(), "transposed")


@pytest.mark.parametrize("S", LENGTHS)
def test_lengths(S: int) -> None:
    for Skv in (None, *random.sample(LENGTHS, 2)):
        case = draw("full" if Skv else random.choice(MASKS), S=S, Skv=Skv, D=random.choice(HEAD_DIMS[:7]))
        case = Case(**{**vars(case), "dtype": random.choice(DTYPES)})
        run_whole(case, "contiguous")


def run_whole(case: Case, strides: str, archs: tuple[int, ...] = (80, 89)) -> Pass:
    """One call over everything."""
    q, k, v, *_ = tensors = case.tensors(any_seed())
    device = random_device(archs)
    one = Pass(case, place(q, strides), [(0, 1, case.S)], device, strides)
    one.absorb(place(k, strides), place(v, strides), [(0, 1, case.key_len)], load=False, store=False, finalize=True)
    check_pass(one, tensors, case.mask, (case, strides, device))
    assert all(bool(t.isnan().all()) for t in one.state), "the state was written though nobody asked"
    return one


@pytest.mark.parametrize("group", GROUPS)
def test_groups(group: int) -> None:
    for Hkv in (1, 2, 3):
        case = Case(
            Hq=Hkv * group, Hkv=Hkv, S=70, D=random.choice((64, 128)), dtype=random.choice(DTYPES), is_causal=True
        )
        run_whole(case, random.choice(STRIDES))


@pytest.mark.parametrize("D", HEAD_DIMS)
def test_strides(D: int) -> None:
    """q, k, v as slices of one packed tensor, rows that start anywhere, keys that are one head for all."""
    for how in ("packed", "padded", "shifted", "expanded"):
        case = Case(B=2, Hq=4, Hkv=2, S=random.choice((33, 70)), D=D, dtype=random.choice(DTYPES), is_causal=True)
        if how != "expanded":
            run_whole(case, how)
            continue
        q, k, v, *rest = case.tensors(any_seed())
        k, v = place_expanded(k), place_expanded(v)
        one = Pass(case, q, [(0, 1, case.S)], random_device())
        one.absorb(k, v, [(0, 1, case.S)], load=False, store=False, finalize=True)
        check_pass(one, (q, k, v, *rest), case.mask, (case, how))


@pytest.mark.parametrize("D", [64, 128, 256])
def test_every_schedule_gives_the_same_bits(D: int) -> None:
    case = draw("causal_documents", S=150, D=D, dtype=random.choice(DTYPES), Hq=1, Hkv=1)
    q, k, v, *_ = tensors = case.tensors(any_seed())
    first = None
    for arch in (80, 89):
        for copies in ("early", "late", "random"):
            for seed in range(5):
                device = random_device((arch,))
                device.copies, device.seed = copies, seed
                one = Pass(case, q, [(0, 1, case.S)], device)
                one.absorb(k, v, [(0, 1, case.S)], load=False, store=True, finalize=True)
                if first is None or first.device.arch != arch:
                    check_pass(one, tensors, case.mask, (case, device))
                    first = one
                for a, b in zip((one.out, one.lse, *one.state), (first.out, first.lse, *first.state), strict=True):
                    assert_same(a, b, (case, device))


@pytest.mark.parametrize("arch", [86, 90, 100, 120])
def test_other_architectures(arch: int) -> None:
    for D in (64, 128, 256):
        case = draw(random.choice(MASKS), S=130, D=D, dtype=torch.bfloat16, Hq=2, Hkv=1)
        run_whole(case, random.choice(STRIDES), (arch,))


def test_more_tiles_than_a_warp_looks_at() -> None:
    """A long sequence whose mask leaves work in few of its tiles: more than 32 tiles, most of them skipped."""
    S = 5000
    for fields in ({"window": (40, 30)}, {"cu_seqlens": (0, 4100, 4200, S)}):
        case = Case(S=S, D=64, Hq=1, Hkv=1, dtype=torch.bfloat16, **fields)
        tensors = case.tensors(any_seed())
        q, k, v = tensors[:3]
        first = 4100
        one = Pass(case, q[:, :, first:], [(first, 1, S - first)], random_device())
        one.absorb(k, v, [(0, 1, S)], load=False, store=False, finalize=True)
        check_pass(one, (q[:, :, first:], k, v), case.mask[first:], case)
        assert mask_fields(case)["key_count"] == S
