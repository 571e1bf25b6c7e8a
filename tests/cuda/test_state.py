"""The small kernels: finalize, merge, delta and cast, for every dtype, head_dim and memory layout."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from .block import NAMES, Device, launch, native
from .tensors import STRIDES, assert_nothing_written_around, assert_same, place, place_expanded, unwritten

HEAD_DIMS = (8, 40, 64, 72, 80, 96, 128, 160, 192, 256)
DTYPES = tuple(NAMES)


def any_device() -> Device:
    return Device(arch=random.choice((80, 89)), seed=random.randrange(5))


def any_rows() -> tuple[int, int, int]:
    return random.choice((1, 2, 3)), random.choice((1, 2, 5)), random.choice((1, 3, 31, 32, 33, 50))


def fields(dtype: torch.dtype, shape: tuple[int, ...]) -> dict:
    B, H, S, D = shape
    return {"dtype": NAMES[dtype], "B": B, "Hq": H, "Hkv": H, "Sq": S, "D": D}


def state(rows: tuple[int, ...], D: int, empty: float = 0.2) -> tuple[Tensor, Tensor, Tensor]:
    """A random state, of which some rows are empty."""
    o, m, l = torch.randn(*rows, D), 9 * torch.randn(rows), torch.rand(rows) * 30 + 0.1  # noqa: E741
    none = torch.rand(rows) < empty
    o[none], m[none], l[none] = 0.0, -torch.inf, 0.0
    return o, m, l


def moved(x: Tensor, by: int) -> Tensor:
    """The same, contiguous, `by` elements after the start of its memory."""
    room = torch.full((x.numel() + by + 7,), torch.nan)
    view = room[by : by + x.numel()].view(x.shape)
    view.copy_(x)
    return view


@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_finalize(dtype: torch.dtype, D: int) -> None:
    for how in STRIDES:
        rows = any_rows()
        o, m, l = state(rows, D)  # noqa: E741
        l[-1, -1, -1] = random.choice((1.0, math.nan))
        o, scale = moved(o, random.choice((0, 1, 2, 4))), random.choice((1e-4, 0.3, 10.0))
        out, lse = unwritten((*rows, D), dtype, how), unwritten(rows, torch.float32)
        launch("finalize", any_device(), **fields(dtype, o.shape), scale=scale, o=o, m=m, l=l, out=out, lse=lse)
        exact = torch.where(l[..., None] == 0, 0.0, o.double() / l.double()[..., None])
        torch.testing.assert_close(out, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(lse, (scale * m.double() + l.double().log()).float(), equal_nan=True)
        assert bool((out[l == 0] == 0).all()) and bool((lse[l == 0] == -math.inf).all())
        assert_nothing_written_around(out)


def merged(own: tuple[Tensor, ...], other: tuple[Tensor, ...], scale: float) -> tuple[Tensor, ...]:
    """In float64, by definition; NaN and infinite references excluded."""
    (o, m, l), (other_o, other_m, other_l) = ([t.double() for t in each] for each in (own, other))  # noqa: E741
    top = torch.maximum(m, other_m)
    factors = [torch.where(x == -torch.inf, 0.0, torch.exp(scale * (x - top))) for x in (m, other_m)]
    o = o * factors[0][..., None] + other_o * factors[1][..., None]
    return o, top, l * factors[0] + other_l * factors[1]


@pytest.mark.parametrize("D", HEAD_DIMS)
def test_merge(D: int) -> None:
    for _ in range(4):
        rows = any_rows()
        own, other, scale = state(rows, D, 0.3), state(rows, D, 0.3), random.choice((1e-4, 0.3, 3.0))
        expected = merged(own, other, scale)
        got = [moved(own[0], random.choice((0, 0, 1, 2))), own[1].clone(), own[2].clone()]
        others = [moved(other[0], random.choice((0, 0, 3, 4))), other[1], other[2]]
        merge(got, others, scale)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b.float(), rtol=2e-5, atol=1e-5)
        for first, second in ((own, other), (other, own)):  # one of them empty: bits
            nothing = first[1] == -torch.inf
            for a, b in zip(got, second, strict=True):
                assert_same(a[nothing], b[nothing])


def merge(own: tuple[Tensor, ...] | list[Tensor], other: tuple[Tensor, ...] | list[Tensor], scale: float) -> None:
    dtype = random.choice(DTYPES)
    o, m, l = own  # noqa: E741
    launch(
        "merge", any_device(), **fields(dtype, tuple(o.shape)), scale=scale, o=o, m=m, l=l, other_o=other[0],
        other_m=other[1], other_l=other[2],
    )  # fmt: skip


INF, NAN = math.inf, math.nan
# (o, m, l) with (o, m, l) gives (o, m, l), at scale 0.25
SPECIAL_ROWS = (
    ((0.0, -INF, 0.0), (0.0, -INF, 0.0), (0.0, -INF, 0.0)),
    ((0.0, -INF, 0.0), (2.0, 1e4, 3.0), (2.0, 1e4, 3.0)),
    ((2.0, 1e4, 3.0), (0.0, -INF, 0.0), (2.0, 1e4, 3.0)),
    ((2.0, 1e4, 3.0), (-2.0, -1e4, 3.0), (2.0, 1e4, 3.0)),
    ((-2.0, -1e4, 3.0), (2.0, 1e4, 3.0), (2.0, 1e4, 3.0)),
    ((2.0, 1e4, 3.0), (1.0, 1e4, 1.0), (3.0, 1e4, 4.0)),
    ((-2.0, -1e4, 3.0), (0.0, -INF, 0.0), (-2.0, -1e4, 3.0)),
    ((NAN, -INF, NAN), (1.0, 2.0, 3.0), (1.0, 2.0, 3.0)),  # all its scores were -inf
    ((1.0, 2.0, 3.0), (NAN, -INF, NAN), (1.0, 2.0, 3.0)),
    ((NAN, -INF, NAN), (0.0, -INF, 0.0), (NAN, -INF, NAN)),
    ((0.0, -INF, 0.0), (NAN, -INF, NAN), (NAN, -INF, NAN)),
    ((NAN, NAN, NAN), (1.0, 2.0, 3.0), (NAN, NAN, NAN)),
    ((1.0, 2.0, 3.0), (NAN, NAN, NAN), (NAN, NAN, NAN)),
    ((NAN, NAN, NAN), (0.0, -INF, 0.0), (NAN, NAN, NAN)),
    ((NAN, 2.0, 3.0), (1.0, 2.0, 1.0), (NAN, 2.0, 4.0)),
    ((1.0, INF, 1.0), (1.0, 2.0, 1.0), (NAN, INF, NAN)),
)


def test_merge_of_special_rows() -> None:
    def column(which: int) -> list[Tensor]:
        o, m, l = (torch.tensor([row[which][i] for row in SPECIAL_ROWS]).view(1, 1, -1) for i in range(3))  # noqa: E741
        return [o[..., None].expand(*o.shape, 72).contiguous(), m, l]

    own = column(0)
    merge(own, column(1), 0.25)
    for a, b in zip(own, column(2), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_delta(dtype: torch.dtype, D: int) -> None:
    for how in (*STRIDES, "expanded"):
        rows = any_rows()
        out, grad_out = (torch.randn(*rows, D).to(dtype) for _ in range(2))
        grad_out = place_expanded(grad_out) if how == "expanded" else place(grad_out, how)
        out = place(out, random.choice((how, "contiguous")) if how != "expanded" else "contiguous")
        lse, grad_lse = 9 * torch.randn(rows), random.choice((None, torch.randn(rows)))
        lse[torch.rand(rows) < 0.2] = -math.inf
        delta, minus_delta, minus_lse_log2 = (unwritten(rows, torch.float32) for _ in range(3))
        launch(
            "delta", any_device(), **fields(dtype, tuple(out.shape)), out=out, grad_out=grad_out, grad_lse=grad_lse,
            lse=lse, delta=delta, minus_delta=minus_delta, minus_lse_log2=minus_lse_log2,
        )  # fmt: skip
        exact = (out.double() * grad_out.double()).sum(-1) - (0.0 if grad_lse is None else grad_lse.double())
        torch.testing.assert_close(delta.double(), exact, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(minus_delta, -delta, rtol=0, atol=0)
        expected = torch.where(lse == -math.inf, -math.inf, lse.double() * -math.log2(math.e))
        torch.testing.assert_close(minus_lse_log2.double(), expected, rtol=1e-6, atol=0)


def test_delta_without_lse() -> None:
    out, grad_out = torch.randn(2, 1, 2, 9, 64).bfloat16()
    delta = unwritten((1, 2, 9), torch.float32)
    launch("delta", any_device(), **fields(out.dtype, tuple(out.shape)), out=out, grad_out=grad_out, delta=delta)
    torch.testing.assert_close(delta, (out.float() * grad_out.float()).sum(-1))


@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cast(dtype: torch.dtype, D: int) -> None:
    for how in STRIDES:
        rows = any_rows()
        x = torch.randn(*rows, D) * 10.0 ** random.randint(-3, 5)
        out = unwritten(tuple(x.shape), dtype, how)
        grad_query = place(x, random.choice(STRIDES))
        launch("cast", any_device(), **fields(dtype, tuple(x.shape)), grad_query=grad_query, out=out)
        assert_same(out, x.to(dtype), how)
        assert_nothing_written_around(out)


@pytest.mark.parametrize("kind", ["finalize", "merge", "delta", "cast"])
def test_no_rows_no_launch(kind: str) -> None:
    for shape in ((0, 1, 1, 8), (1, 0, 1, 8), (1, 1, 0, 8)):
        assert native.plan(kind, 80, fields(torch.bfloat16, shape)) == []


@pytest.mark.parametrize("D", [64, 128, 256])
def test_bytes_and_instructions(D: int) -> None:
    """Nothing is read or written twice, whole sectors are touched, and there are few instructions per 16 bytes."""
    rows, device = (2, 3, 128), Device()
    (o, m, l), other = state(rows, D), state(rows, D)  # noqa: E741
    out, lse = unwritten((*rows, D), torch.bfloat16), unwritten(rows, torch.float32)
    n = m.numel()
    given = fields(torch.bfloat16, tuple(o.shape))
    reports = {
        "finalize": launch("finalize", device, **given, scale=1.0, o=o, m=m, l=l, out=out, lse=lse),
        "delta": launch(
            "delta",
            device,
            **given,
            out=out,
            grad_out=out,
            delta=m.clone(),
            lse=lse,
            minus_delta=m.clone(),
            minus_lse_log2=m.clone(),
        ),  # fmt: skip
        "cast": launch("cast", device, **given, grad_query=o, out=out),
        "merge": launch(
            "merge", device, **given, scale=1.0, o=o, m=m, l=l, other_o=other[0], other_m=m.clone(), other_l=other[2]
        ),
    }
    moved_bytes = {"finalize": (4, 2), "delta": (4, 0), "cast": (4, 2), "merge": (8, 4)}
    for kind, (report,) in reports.items():
        read, written = moved_bytes[kind]
        assert report.global_read.bytes <= n * (read * D + 16 * 8), kind  # every lane reads the numbers of its row
        assert report.global_write.bytes <= n * (written * D + 12), kind  # at most three numbers of a row
        assert report.global_read.sectors <= 1.1 * n * (read * D + 16) / 32, kind
        assert report.global_write.sectors <= 1.1 * n * (written * D + 12) / 32 + 3 * n / 4, kind
        # A multiprocessor that issues 4 instructions per cycle gets some 20 bytes of memory in that time.
        per_access = (report.total - report.instructions["move"]) * 32 * 16 / (n * (read + written) * D)
        print(kind, D, f"{per_access:.1f} instructions per 16 bytes")
        assert per_access <= 80, (kind, per_access)
