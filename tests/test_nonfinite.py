"""NaN, inf and rows without keys: IEEE rules in the rows that see them, and not a trace in the others."""

from __future__ import annotations

import math
import random

import pytest
import torch
from cases import DTYPES, LAYOUTS, MASKS, Case, random_case, run_virtual
from reference import Result, dense, half_precision_ratios, relative_errors, same_bits, term_norms
from torch import Tensor

import ringattn_ext as ra

pytestmark = pytest.mark.timeout(60)
RINGS = [1, 3]


def small_case(kind: str, dtype: torch.dtype) -> Case:
    return random_case(kind, dtype=dtype, S=random.choice((9, 30, 70)), B=1, Hq=2, Hkv=1, D=8, scale=None)


def assert_same_special_values(got: Tensor, expected: Tensor, note: object) -> None:
    assert torch.equal(got.isnan(), expected.isnan()), note
    infinite = expected.isinf()
    assert torch.equal(got.isinf(), infinite), note
    assert torch.equal(got[infinite].double(), expected[infinite]), note


def poisoned(tensors: tuple[Tensor, ...], which: str, token: int, value: float) -> tuple[Tensor, ...]:
    """One element (for grad_lse: one row) of one token of one tensor, in every batch and head, is `value`."""
    names = ("query", "key", "value", "grad_out", "grad_lse")
    changed = [t.clone() for t in tensors]
    target = changed[names.index(which)]
    if which == "grad_lse":
        target[:, :, token] = value
    else:
        target[:, :, token, random.randrange(target.shape[3])] = value
    return tuple(changed)


def touched(case: Case, which: str, token: int) -> tuple[Tensor, Tensor]:
    """[S] bool each: the queries, and the keys, whose results may depend on the poisoned element."""
    mask = case.mask
    queries = mask[:, token] if which in ("key", "value") else torch.arange(case.S) == token
    return queries, mask[queries].any(0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["query", "key", "value", "grad_out", "grad_lse"])
@pytest.mark.parametrize("P", RINGS)
def test_special_values_stay_where_they_are_seen(P: int, which: str, value: float) -> None:
    for kind in MASKS[1:]:
        case, layout = small_case(kind, random.choice(DTYPES)), random.choice(LAYOUTS)
        token = random.randrange(case.S)
        clean = case.tensors(random.randrange(2**31))
        bad = poisoned(clean, which, token, value)
        note = (case, layout, token)
        got, expected = run_virtual(case, bad, P, layout), run_virtual(case, clean, P, layout)
        queries, keys = touched(case, which, token)
        for name in Result._fields:
            away = ~(keys if name in ("dk", "dv") else queries)
            a, b = (getattr(r, name)[:, :, away] for r in (got, expected))
            assert same_bits(a.contiguous(), b.contiguous()), (name, note)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("P", RINGS)
def test_nan_follows_ieee(P: int, dtype: torch.dtype) -> None:
    """NaN where the dense formulas, applied row by row to the visible keys, give NaN, and nowhere else."""
    for kind in MASKS:
        for which in random.sample(("query", "key", "value", "grad_out", "grad_lse"), 3):
            case, layout = small_case(kind, dtype), random.choice(LAYOUTS)
            bad = poisoned(case.tensors(random.randrange(2**31)), which, random.randrange(case.S), math.nan)
            got, expected = run_virtual(case, bad, P, layout), dense(bad, case.mask, case.scale, by_rows=True)
            for name in Result._fields:
                assert_same_special_values(getattr(got, name), getattr(expected, name), (name, which, case, layout))


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("P", RINGS)
def test_infinity_follows_ieee(P: int, which: str, value: float) -> None:
    """A score of +inf makes the row NaN, one of -inf takes part with weight 0; inf in a value shows as such."""
    for kind in MASKS:
        for dtype in DTYPES:
            case, layout = small_case(kind, dtype), random.choice(LAYOUTS)
            bad = poisoned(case.tensors(random.randrange(2**31)), which, random.randrange(case.S), value)
            got, expected = run_virtual(case, bad, P, layout), dense(bad, case.mask, case.scale, by_rows=True)
            assert_same_special_values(got.out, expected.out, ("out", case, layout))
            assert_same_special_values(got.lse, expected.lse, ("lse", case, layout))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("P", RINGS)
def test_a_weight_of_zero_is_no_mask(P: int, dtype: torch.dtype) -> None:
    """A visible key with the score -inf: its weight is exactly 0, and 0 * inf in its value is NaN."""
    q, k, v = (torch.rand(1, 1, 9, 4).to(dtype) + 0.5 for _ in range(3))
    k[:, :, 4] = -math.inf
    expected = dense((q, k, v, torch.zeros_like(q), torch.zeros(1, 1, 9)), torch.ones(9, 9, dtype=torch.bool), None)
    out, lse = ra.virtual_ring_attention(q, k, v, world_size=P, return_lse=True)
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 1e-5)
    torch.testing.assert_close(out.double(), expected.out, rtol=tolerance, atol=0.0)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-5, atol=1e-6)
    v[:, :, 4, 1] = math.inf
    out = ra.virtual_ring_attention(q, k, v, world_size=P)
    assert bool(out[..., 1].isnan().all()) and not bool(out[..., [0, 2, 3]].isnan().any())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("P", RINGS)
def test_all_scores_minus_infinity_is_nan(P: int, dtype: torch.dtype) -> None:
    """As the dense softmax: keys that are seen but score -inf are not the same as no keys."""
    q = torch.ones(1, 1, 9, 4, dtype=dtype)
    k, v = torch.full_like(q, -math.inf), torch.ones_like(q)
    for is_causal in (False, True):
        out = ra.virtual_ring_attention(q, k, v, world_size=P, is_causal=is_causal)
        assert bool(out.isnan().all())


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("P", [1, 3, 8])
def test_scores_around_ten_thousand(P: int, dtype: torch.dtype, sign: int) -> None:
    """Nothing overflows, and padding with zeros, whose score would win against -10,000, does not show."""
    S, D = random.choice((63, 65, 100)), 8
    for kind in ("full", "causal", "window", "documents"):
        case = random_case(kind, dtype=dtype, S=S, D=D, B=1, Hq=2, Hkv=1, scale=1.0)
        q, k, *rest = case.tensors(random.randrange(2**31))
        q = q.abs().clamp(0.5, 2.0).round(decimals=1)
        k = sign * 1e4 / q.mean() / D + k.round(decimals=1)
        tensors = (q, k, *rest)
        got = run_virtual(case, tensors, P, random.choice(LAYOUTS))
        exact = dense(tensors, case.mask, case.scale)
        assert float(exact.lse.abs().mean()) > 5e3
        errors = relative_errors(got, exact, term_norms(tensors, case.mask, case.scale))
        # float32 has steps of 1e-3 at 1e4, and exp sees them.
        assert max(errors.values()) <= (1e-9 if dtype == torch.float64 else 5e-3), (errors, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("P", [1, 2, 3, 5])
def test_rows_without_keys(P: int, dtype: torch.dtype) -> None:
    case = Case(B=2, Hq=4, Hkv=2, S=21, Skv=0, D=8, dtype=dtype)
    got = run_virtual(case, case.tensors(random.randrange(2**31)), P, random.choice(LAYOUTS))
    assert same_bits(got.out, torch.zeros_like(got.out))
    assert bool((got.lse == -math.inf).all())
    assert bool((got.dq == 0).all()) and got.dk.numel() == got.dv.numel() == 0


@pytest.mark.parametrize("P", RINGS)
def test_large_values_in_half_precision(P: int) -> None:
    case = random_case("causal", dtype=torch.float16, S=100, D=64, B=1, Hq=2, Hkv=2, scale=None)
    q, k, v, do, dlse = case.tensors(random.randrange(2**31), lse_gradient=False)
    tensors = (q * 8, k * 8, v * 100, do, dlse)
    got = run_virtual(case, tensors, P, random.choice(LAYOUTS))
    ratios = half_precision_ratios(got, tensors, case.mask, case.scale)
    assert max(ratios.values()) <= 1.5, ratios
    assert_exact_lse(got, tensors, case)


def assert_exact_lse(got: Result, tensors: tuple[Tensor, ...], case: Case) -> None:
    torch.testing.assert_close(got.lse.double(), dense(tensors, case.mask, case.scale).lse, rtol=2e-5, atol=2e-5)
