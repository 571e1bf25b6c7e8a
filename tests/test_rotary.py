"""RoPE at explicit positions, against multiplication by complex numbers."""

from __future__ import annotations

import random

import pytest
import torch
from cases import DTYPES, LAYOUTS, restride
from reference import same_bits
from torch import Tensor

import ringattn_ext as ra


def exact(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """float64: the pair (i, i + D/2) as a complex number, times exp(1j * position * base ** (-2i / D))."""
    half = x.shape[-1] // 2
    numbers = torch.complex(x[..., :half].double(), x[..., half:].double())
    angles = positions.double()[..., None] * base ** (-2.0 * torch.arange(half, dtype=torch.float64) / x.shape[-1])
    if positions.dim() == 2:
        angles = angles[:, None]
    turned = numbers * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def random_positions(shape: tuple[int, ...], largest: int = 100_000) -> Tensor:
    return torch.randint(0, largest, shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [2, 8, 64, 256])
def test_against_complex_numbers(D: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 17, D).to(dtype)
    for positions in (torch.arange(17), random_positions((17,)), random_positions((2, 17))):
        for base in (10000.0, 500000, 10.0):
            got = ra.rotary(x, positions, base=base)
            assert got.dtype == dtype and got.shape == x.shape
            expected = exact(x, positions, base)
            if dtype in (torch.float64, torch.float32):
                tolerance = 1e-10 if dtype == torch.float64 else 1e-6
                assert float((got.double() - expected).norm()) <= tolerance * float(expected.norm())
            else:  # computed in float32 and rounded once: half a unit in the last place, and a little
                unit = torch.finfo(dtype).eps / 2
                torch.testing.assert_close(got.double(), expected, rtol=unit * 1.01, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES[2:], ids=str)
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    x, positions = torch.randn(2, 3, 50, 64).to(dtype), random_positions((50,))
    assert same_bits(ra.rotary(x, positions), ra.rotary(x.float(), positions).to(dtype))


def test_position_of_a_million() -> None:
    positions = torch.arange(10**6 - 8, 10**6 + 8)
    x = torch.randn(1, 1, 16, 128)
    expected = exact(x, positions)
    assert float((ra.rotary(x, positions).double() - expected).abs().max()) <= 1e-5
    x = x.double()
    assert float((ra.rotary(x, positions) - exact(x, positions)).abs().max()) <= 1e-8


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16])
def test_integer_types_of_positions(dtype: torch.dtype) -> None:
    x, positions = torch.randn(1, 2, 9, 8), random_positions((9,), 30_000)
    assert same_bits(ra.rotary(x, positions.to(dtype)), ra.rotary(x, positions))


def test_position_zero_changes_nothing() -> None:
    x = torch.randn(1, 2, 9, 8)
    assert torch.equal(ra.rotary(x, torch.zeros(9, dtype=torch.int64)), x)


def test_lengths_are_kept_and_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 20, 64, dtype=torch.float64)
    positions, shift = random_positions((20,)), random.randint(1, 10_000)
    torch.testing.assert_close(ra.rotary(q, positions).norm(dim=-1), q.norm(dim=-1))
    here, there = (ra.rotary(q, p) @ ra.rotary(k, p).transpose(-1, -2) for p in (positions, positions + shift))
    torch.testing.assert_close(here, there, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_a_ring_get_the_angles_of_the_whole(layout: str) -> None:
    x = torch.randn(2, 2, 23, 16)
    whole = ra.rotary(x, torch.arange(23))
    for rank in range(4):
        own = ra.positions(23, layout=layout, rank=rank, world_size=4)
        assert same_bits(ra.rotary(x[:, :, own], own), whole[:, :, own])


@pytest.mark.parametrize("shape", [(5,), (2, 5)])
def test_gradient(shape: tuple[int, ...]) -> None:
    x = torch.randn(2, 2, 5, 6, dtype=torch.float64, requires_grad=True)
    positions = random_positions(shape)
    assert torch.autograd.gradcheck(lambda x: ra.rotary(x, positions), x)
    assert torch.autograd.gradgradcheck(lambda x: ra.rotary(x, positions), x)


@pytest.mark.parametrize("strides", ["transposed", "stepping"])
def test_strides(strides: str) -> None:
    x, positions = torch.randn(2, 3, 9, 8), random_positions((2, 9))
    assert same_bits(ra.rotary(restride(x, strides), positions), ra.rotary(x, positions))


def test_empty_shard() -> None:
    assert ra.rotary(torch.randn(2, 3, 0, 8), torch.arange(0)).shape == (2, 3, 0, 8)


X, POSITIONS = torch.zeros(2, 3, 5, 8), torch.arange(5)


@pytest.mark.parametrize(
    ("x", "positions", "options", "error", "match"),
    [
        (X[..., :7], POSITIONS, {}, ValueError, "even last dimension, got 7"),
        (X[..., :1], POSITIONS, {}, ValueError, "even last dimension, got 1"),
        (X[0], POSITIONS, {}, ValueError, "4 dimensions"),
        (X, torch.arange(4), {}, ValueError, r"positions: expected shape \[5\] or \[2, 5\], got \[4\]"),
        (X, torch.zeros(3, 5, dtype=torch.int64), {}, ValueError, "positions"),
        (X, POSITIONS.float(), {}, TypeError, "positions"),
        (X, POSITIONS.bool(), {}, TypeError, "positions"),
        (X.long(), POSITIONS, {}, TypeError, "x: expected a floating-point dtype"),
        (X, POSITIONS, {"base": 0.0}, ValueError, "base"),
        (X, POSITIONS, {"base": -2.0}, ValueError, "base"),
        (X, POSITIONS, {"base": float("nan")}, ValueError, "base"),
    ],
)
def test_bad_input(x: Tensor, positions: Tensor, options: dict, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ra.rotary(x, positions, **options)
