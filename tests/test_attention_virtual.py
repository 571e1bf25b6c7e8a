"""virtual_ring_attention against dense float64 attention: every layout, every mask, rings of 1 to 64."""

from __future__ import annotations

import random

import pytest
import torch
from cases import DTYPES, LAYOUTS, MASKS, Case, fewer_keys, random_case, run_virtual
from reference import assert_exact, half_precision_ratios

import ringattn_ext as ra


def check(case: Case, P: int, layout: str) -> None:
    tensors = case.tensors(random.randrange(2**31))
    got = run_virtual(case, tensors, P, layout)
    assert_exact(got, tensors, case.mask, case.scale, (case, P, layout))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float64(layout: str, kind: str) -> None:
    for P in (1, 2, 3, 4, random.randint(5, 8), random.randint(9, 16)):
        check(random_case(kind), P, layout)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", MASKS)
def test_float32(kind: str) -> None:
    for P in (1, 2, 3, 5, 16):
        check(random_case(kind, dtype=torch.float32), P, random.choice(LAYOUTS))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_half_precision(kind: str, dtype: torch.dtype) -> None:
    for P in (1, 2, 5):
        S = random.randint(64, 200)
        case = random_case(kind, dtype=dtype, S=S, D=random.choice((64, 80, 128)))
        tensors = case.tensors(random.randrange(2**31), lse_gradient=False)
        layout = random.choice(LAYOUTS)
        got = run_virtual(case, tensors, P, layout)
        ratios = half_precision_ratios(got, tensors, case.mask, case.scale)
        assert max(ratios.values()) <= 1.5, (ratios, case, P, layout)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ring_of_64(layout: str) -> None:
    for kind in random.sample(MASKS, 3):
        check(random_case(kind, B=1, Hkv=1, Hq=2, S=random.choice((7, 64, 150, 300)), D=8), 64, layout)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("S", [0, 1, 2, 3, 5, 7, 63, 64, 65, 127, 129])
def test_lengths(S: int, layout: str) -> None:
    """Fewer tokens than ranks, empty shards, and lengths around the size of a tile."""
    for P in (1, 2, 4, 9):
        check(Case(S=S, D=4, Hq=2, Hkv=1), P, layout)
        check(Case(S=S, D=4, is_causal=True), P, layout)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("D", [1, 8, 40, 64, 72, 80, 96, 104, 128, 160, 192, 224, 255, 256])
def test_head_dims(D: int) -> None:
    for dtype in DTYPES[:2]:
        check(random_case("causal", D=D, S=70, dtype=dtype), random.randint(1, 4), random.choice(LAYOUTS))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("Hq", "Hkv"), [(1, 1), (4, 2), (3, 1), (6, 2), (8, 2), (8, 1), (9, 3)])
def test_grouped_queries(Hq: int, Hkv: int) -> None:
    for P in (1, 3):
        check(random_case(random.choice(MASKS), Hq=Hq, Hkv=Hkv), P, random.choice(LAYOUTS))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cross_attention(layout: str) -> None:
    for P in (1, 2, 3, 4, 7, 16):
        for _ in range(2):
            check(fewer_keys(random_case("full")), P, layout)


@pytest.mark.parametrize("shape", [(0, 2, 9, 8), (2, 2, 0, 8)])
def test_nothing_to_do(shape: tuple[int, ...]) -> None:
    for P in (1, 3):
        x = torch.randn(shape, requires_grad=True)
        out, lse = ra.virtual_ring_attention(x, x, x, world_size=P, is_causal=True, return_lse=True)
        assert out.shape == shape and lse.shape == shape[:3]
        (out.sum() + lse.sum()).backward()
        assert x.grad is not None and x.grad.shape == shape


@pytest.mark.parametrize("window", [(-1, -1), (0, 0), (-1, 0), (0, -1), (3, 0), (0, 3), (5, 2), (200, 200)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_windows(window: tuple[int, int], is_causal: bool) -> None:
    for P in (1, 2, 5):
        check(Case(S=83, D=8, window=window, is_causal=is_causal), P, random.choice(LAYOUTS))


@pytest.mark.parametrize(
    "cu_seqlens", [(0, 83), (0, 0, 83, 83), (0, 1, 2, 3, 83), (0, 40, 40, 40, 83), tuple(range(84))], ids=str
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_documents(cu_seqlens: tuple[int, ...], is_causal: bool) -> None:
    for P in (1, 2, 5):
        check(Case(S=83, D=8, cu_seqlens=cu_seqlens, is_causal=is_causal), P, random.choice(LAYOUTS))


@pytest.mark.parametrize("scale", [1e-4, 0.3, 1, 10.0])
def test_scales(scale: float) -> None:
    for P in (1, 3):
        check(Case(S=83, D=8, scale=scale, is_causal=True), P, random.choice(LAYOUTS))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_documents_in_both_integer_types(dtype: torch.dtype) -> None:
    q = torch.randn(1, 2, 20, 8)
    bounds = torch.tensor([0, 7, 20], dtype=dtype)
    got = ra.virtual_ring_attention(q, q, q, world_size=3, cu_seqlens=bounds)
    for part in (slice(0, 7), slice(7, 20)):
        alone = ra.virtual_ring_attention(*[q[:, :, part]] * 3, world_size=1)
        torch.testing.assert_close(got[:, :, part], alone)
