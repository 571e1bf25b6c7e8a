"""What forward executes and moves, counted in the emulator: flops, instructions, bytes, bank conflicts."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from cases import LAYOUTS, MASKS, Case, random_mask
from emulator import Report

from ringattn_ext._C import Layout

from .block import NAMES, Device, native
from .ring import Pass, positions, segments_of

FLOPS_PER_MMA = 2 * 16 * 8 * 16
MODES = {
    "whole": (False, False, True),
    "first": (False, True, False),
    "middle": (True, True, False),
    "last": (True, False, True),
}
LIMITS = {64: 3.5, 128: 2.5}


def run(case: Case, arch: int, mode: str, layout: Layout | None = None, rank: int = 0, block: int = 0) -> Report:
    """One call on fresh tensors: the queries of one rank, the keys of another."""
    layout, keys = layout or Layout("contiguous", 1, case.S), layout or Layout("contiguous", 1, case.key_len)
    q, k, v, *_ = case.tensors(random.randrange(2**31))
    own, theirs = segments_of(layout, rank), segments_of(keys, block)
    device = Device(arch, copies="random", seed=random.randrange(5), check_races=False)
    one = Pass(case, q[:, :, positions(own)].contiguous(), own, device)
    one.state[0].zero_(), one.state[1].fill_(-torch.inf), one.state[2].zero_()
    chosen = positions(theirs)
    load, store, finalize = MODES[mode]
    one.absorb(k[:, :, chosen].contiguous(), v[:, :, chosen].contiguous(), theirs, load, store, finalize)
    (report,) = one.reports
    return report


def shape(arch: int, D: int) -> dict[str, int]:
    return native.shape("forward", arch, next(tile for tile in (64, 128, 256) if D <= tile))


def instructions_per_mma(report: Report) -> float:
    others = report.total - report.instructions["matrix"] - report.instructions["move"]
    return others * FLOPS_PER_MMA / report.matrix_flops


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arch", [80, 89])
@pytest.mark.parametrize("D", [64, 128])
def test_instructions(D: int, arch: int, mode: str) -> None:
    """Warp instructions other than mma and moves per mma, 2048 x 2048, full mask; bytes, sectors, conflicts."""
    S = 2048
    case = Case(Hq=1, Hkv=1, S=S, D=D, dtype=random.choice(tuple(NAMES)))
    report = run(case, arch, mode)
    assert report.matrix_flops == 4 * S * S * D
    assert report.conflicts == 0, "bank conflicts"
    load, store, finalize = MODES[mode]
    query_tiles = S // shape(arch, D)["queries"]
    state = S * (4 * D + 4 + 4)
    ideal = 2 * S * D + 4 * S * D * query_tiles + (load + store) * state + finalize * S * (2 * D + 4)
    moved = report.global_read.bytes + report.global_write.bytes
    found = instructions_per_mma(report)
    classes = {kind: round(n * FLOPS_PER_MMA / report.matrix_flops, 3) for kind, n in report.instructions.items() if n}
    print(f"sm_{arch} D={D} {mode} {case.dtype}: {found:.3f} per mma, {moved / ideal:.4f} of the bytes; {classes}")
    assert moved <= 1.05 * ideal, f"{moved / ideal} of the ideal bytes"
    assert report.global_read.sectors <= 1.05 * report.global_read.ideal
    assert report.global_write.sectors <= 1.05 * report.global_write.ideal
    assert found <= LIMITS[D], report.instructions


@pytest.mark.parametrize("D", [64, 128, 256])
def test_flops_of_full_masks(D: int) -> None:
    for arch in (80, 89):
        case = Case(B=2, Hq=4, Hkv=2, S=128, Skv=random.choice((128, 256, 384)), D=D, dtype=random.choice(tuple(NAMES)))
        report = run(case, arch, random.choice(list(MODES)))
        assert report.matrix_flops == 4 * case.B * case.Hq * case.S * case.key_len * D
        assert report.conflicts == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MASKS)
def test_flops_of_masks(kind: str, layout: str) -> None:
    """Exactly the (query tile, key tile) pairs that hold a visible pair; nothing is read of the other key tiles."""
    for P in random.sample((1, 2, 3, 4), 2):
        S, D, arch = random.randint(300, 900), random.choice((40, 64, 128, 256)), random.choice((80, 89))
        case = Case(Hq=1, Hkv=1, S=S, D=D, dtype=random.choice(tuple(NAMES)), **random_mask(kind, S))
        ring = Layout(layout, P, S)
        rank, block = random.randrange(P), random.randrange(P)
        report = run(case, arch, random.choice(list(MODES)), ring, rank, block)
        mask = case.mask[positions(segments_of(ring, rank))][:, positions(segments_of(ring, block))].numpy()
        tile = shape(arch, D)
        pairs = count_tiles(mask, tile["queries"], tile["keys"])
        padded = next(n for n in (64, 128, 256) if D <= n)
        note = (case, layout, P, rank, block, arch)
        assert report.matrix_flops == pairs * 4 * tile["queries"] * tile["keys"] * padded, note
        assert report.conflicts == 0, note


def count_tiles(mask: np.ndarray, queries: int, keys: int) -> int:
    return sum(
        bool(mask[i : i + queries, j : j + keys].any())
        for i in range(0, mask.shape[0], queries)
        for j in range(0, mask.shape[1], keys)
    )


@pytest.mark.parametrize("D", [64, 128, 256])
def test_bytes_of_a_causal_mask(D: int) -> None:
    """Keys that a query tile does not see are not read."""
    S, arch = 1024, random.choice((80, 89))
    case = Case(Hq=1, Hkv=1, S=S, D=D, dtype=torch.bfloat16, is_causal=True)
    report = run(case, arch, "whole")
    tile = shape(arch, D)
    pairs = count_tiles(case.mask.numpy(), tile["queries"], tile["keys"])
    ideal = 2 * S * D + pairs * 4 * tile["keys"] * D + S * (2 * D + 4)
    assert report.global_read.bytes + report.global_write.bytes <= 1.05 * ideal
