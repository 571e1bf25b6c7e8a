"""What backward executes and moves, counted in the emulator: flops, instructions, bytes, bank conflicts."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from cases import LAYOUTS, MASKS, Case, random_mask
from emulator import Report

from ringattn_ext._C import Layout

from .backward_cases import Backward, Gradients
from .block import NAMES, Device, native
from .ring import Segments, positions, segments_of

FLOPS_PER_MMA = 2 * 16 * 8 * 16
MODES = pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
# Warp instructions other than mma and moves per mma. At D = 128 on sm_89, whose tiles of 64 keys are half as tall, the
# additions to dQ, which every key tile makes, weigh twice: 2.49 is above the 2.4 that sm_80 meets.
LIMITS = {(80, 64): 3.2, (80, 128): 2.4, (89, 64): 3.2, (89, 128): 2.4}
LIMITS_WITH_ATOMICS = LIMITS | {(89, 128): 2.5}


def any_dtype() -> torch.dtype:
    return random.choice(tuple(NAMES))


def run(case: Case, arch: int, deterministic: bool, segments: tuple[Segments, Segments] | None = None) -> list[Report]:
    """One call: by key tiles, in deterministic mode by query tiles too. segments: of the queries and of the keys."""
    device = Device(arch, copies="random", seed=random.randrange(5), check_races=False)
    one = Backward(case, case.tensors(random.randrange(2**31)), device, deterministic)
    if segments is None:
        one.whole()
        return one.reports
    own, theirs = (positions(s) for s in segments)
    q, k, v, grad_out = (
        t[:, :, p].contiguous() for t, p in zip(one.tensors[:4], (own, theirs, theirs, own), strict=True)
    )
    one.add((q, k, v, grad_out), segments, Gradients(*(torch.zeros(t.shape) for t in (q, k, v))))
    return one.reports


def shapes(arch: int, D: int) -> list[dict[str, int]]:
    return [native.shape(f"backward_{kind}", arch, padded(D)) for kind in ("keys", "queries")]


def padded(D: int) -> int:
    return next(tile for tile in (64, 128, 256) if D <= tile)


def count_tiles(mask: np.ndarray, tile: dict[str, int]) -> int:
    """The (query tile, key tile) pairs that hold a visible pair."""
    rows, columns = tile["queries"], tile["keys"]
    return sum(
        bool(mask[i : i + rows, j : j + columns].any())
        for i in range(0, mask.shape[0], rows)
        for j in range(0, mask.shape[1], columns)
    )


def ideal_bytes(case: Case, arch: int, deterministic: bool) -> list[int]:
    """Of each kernel, for lengths that are multiples of the tiles and a mask that lets every token see something.

    By key tiles: k and v once per key head; of each visible tile pair and query head q, dO, two statistics per query
    and, with atomics, one addition to each element of dQ; one addition to each element of dK and dV.
    By query tiles: q, dO, the statistics and one addition to each element of dQ; of each visible tile pair k and v.
    An addition of a float counts as 4 bytes.
    """
    by_keys, by_queries = shapes(arch, case.D)
    mask, D = case.mask.numpy(), case.D
    queries, keys = case.B * case.Hq * case.S, case.B * case.Hkv * case.key_len
    pairs = case.B * case.Hq * count_tiles(mask, by_keys)
    ideal = [4 * D * keys + 8 * D * keys + pairs * by_keys["queries"] * (4 * D + 8 + (not deterministic) * 4 * D)]
    if deterministic:
        pairs = case.B * case.Hq * count_tiles(mask, by_queries)
        ideal.append(queries * (4 * D + 8 + 4 * D) + pairs * by_queries["keys"] * 4 * D)
    return ideal


def check_traffic(case: Case, arch: int, deterministic: bool, reports: list[Report]) -> None:
    for report, ideal in zip(reports, ideal_bytes(case, arch, deterministic), strict=True):
        moved = report.global_read.bytes + report.global_write.bytes
        assert ideal <= moved <= 1.05 * ideal, (moved / ideal, case, arch, deterministic)
        assert report.global_read.sectors <= 1.05 * report.global_read.ideal
        assert report.conflicts == 0, ("bank conflicts", case, arch, deterministic)


@MODES
@pytest.mark.parametrize("arch", [80, 89])
@pytest.mark.parametrize("D", [64, 128])
def test_instructions(D: int, arch: int, deterministic: bool) -> None:
    """2048 x 2048, full mask; in deterministic mode both kernels together, of their own mma count."""
    S = 2048
    case = Case(Hq=1, Hkv=1, S=S, D=D, dtype=any_dtype())
    reports = run(case, arch, deterministic)
    assert [r.matrix_flops for r in reports] == [n * S * S * D for n in ((8, 6) if deterministic else (10,))]
    others = [r.total - r.instructions["matrix"] - r.instructions["move"] for r in reports]
    mma = [r.matrix_flops // FLOPS_PER_MMA for r in reports]
    for report, count in zip(reports, mma, strict=True):
        classes = {kind: round(n / count, 3) for kind, n in report.instructions.items() if n}
        print(f"sm_{arch} D={D} {case.dtype}: {classes}")
    found = sum(others) / sum(mma)
    print(f"sm_{arch} D={D} {found:.3f} per mma, of each kernel {[n / m for n, m in zip(others, mma, strict=True)]}")
    assert found <= (LIMITS if deterministic else LIMITS_WITH_ATOMICS)[arch, D]
    check_traffic(case, arch, deterministic, reports)


@MODES
@pytest.mark.parametrize("arch", [80, 89])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_flops_and_bytes_of_full_masks(D: int, arch: int, deterministic: bool) -> None:
    S, Skv = random.choice((128, 256)), random.choice((128, 256, 384))
    case = Case(B=2, Hq=4, Hkv=2, S=S, Skv=Skv, D=D, dtype=any_dtype())
    reports = run(case, arch, deterministic)
    flops = sum(r.matrix_flops for r in reports)
    assert flops == (14 if deterministic else 10) * case.B * case.Hq * S * Skv * D
    check_traffic(case, arch, deterministic, reports)


@MODES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MASKS)
def test_flops_of_masks(kind: str, layout: str, deterministic: bool) -> None:
    """Exactly the pairs of a query tile and a key tile that hold a visible pair, whatever is wasted inside of them."""
    S, D, arch = random.randint(200, 700), random.choice((40, 64, 128, 256)), random.choice((80, 89))
    case = Case(Hq=2, Hkv=1, S=S, D=D, dtype=any_dtype(), **random_mask(kind, S))
    ring = Layout(layout, random.randint(1, 4), S)
    rank, block = random.randrange(ring.world_size), random.randrange(ring.world_size)
    segments = segments_of(ring, rank), segments_of(ring, block)
    reports = run(case, arch, deterministic, segments)
    mask = case.mask[positions(segments[0])][:, positions(segments[1])].numpy()
    products = (8, 6) if deterministic else (10,)
    for report, tile, flops in zip(reports, shapes(arch, D)[: len(products)], products, strict=True):
        expected = flops * count_tiles(mask, tile) * tile["queries"] * tile["keys"] * padded(D) * case.Hq
        note = (case, layout, ring.world_size, rank, block, arch)
        assert report.matrix_flops == expected, note
        assert report.conflicts == 0, note


@MODES
@pytest.mark.parametrize("arch", [80, 89])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_bytes_of_a_causal_mask(D: int, arch: int, deterministic: bool) -> None:
    """Tiles that see nothing of each other are not read, nor are keys once for each query head."""
    case = Case(Hq=2, Hkv=1, S=512, D=D, dtype=any_dtype(), is_causal=True)
    check_traffic(case, arch, deterministic, run(case, arch, deterministic))
