"""How far results are from exact ones on 100,000 elements and more: against the flash backend, and against P = 1.

The figures are printed: pytest -s tests/test_accuracy.py.
"""

from __future__ import annotations

import random

import pytest
import torch
from cases import Case, run_virtual
from reference import TOLERANCE, Result, dense, half_precision_ratios, relative_errors, term_norms

pytestmark = pytest.mark.timeout(120)

CASES = {
    "causal": Case(Hq=4, Hkv=4, S=640, D=64, is_causal=True),
    "full": Case(Hq=2, Hkv=2, S=512, D=128),
    "window": Case(Hq=4, Hkv=4, S=640, D=64, is_causal=True, window=(100, 0)),
    "documents": Case(Hq=4, Hkv=4, S=640, D=64, cu_seqlens=(0, 90, 90, 333, 640)),
    "grouped": Case(Hq=8, Hkv=4, S=640, D=40, is_causal=True),
}


def prepared(name: str, dtype: torch.dtype, *, lse_gradient: bool = True) -> tuple[Case, tuple[torch.Tensor, ...]]:
    fields = {**vars(CASES[name]), "dtype": dtype}
    case = Case(**fields)
    tensors = case.tensors(random.randrange(2**31), lse_gradient=lse_gradient)
    assert min(t.numel() for t in tensors[:4]) >= 100_000
    return case, tensors


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_no_worse_than_flash(dtype: torch.dtype, name: str) -> None:
    case, tensors = prepared(name, dtype, lse_gradient=False)
    for P in (1, 4):
        got = run_virtual(case, tensors, P, "zigzag")
        ratios = half_precision_ratios(got, tensors, case.mask, case.scale)
        print(name, dtype, f"P = {P}:", {key: round(value, 3) for key, value in ratios.items()})
        assert max(ratios.values()) <= 1.5, ratios
        exact = dense(tensors, case.mask, case.scale)
        assert relative_errors(got, exact, {})["lse"] <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_error_does_not_grow_with_the_ring(dtype: torch.dtype, name: str) -> None:
    case, tensors = prepared(name, dtype)
    exact, terms = dense(tensors, case.mask, case.scale), term_norms(tensors, case.mask, case.scale)
    one = relative_errors(run_virtual(case, tensors, 1, "zigzag"), exact, terms)
    print(name, dtype, "P = 1:", {key: f"{value:.2e}" for key, value in one.items()})
    layout = random.choice(("contiguous", "zigzag", "striped"))
    for P in (2, 4, 8, 16):
        errors = relative_errors(run_virtual(case, tensors, P, layout), exact, terms)
        growth = {key: errors[key] / one[key] for key in Result._fields}
        print(name, dtype, layout, f"P = {P}:", {key: round(value, 3) for key, value in growth.items()})
        assert growth["out"] <= 1.05, (P, layout, growth)
        assert max(growth[key] for key in ("dq", "dk", "dv")) <= 1.10, (P, layout, growth)
        if dtype == torch.float32:
            assert max(errors.values()) <= TOLERANCE[dtype], errors


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_saturated_softmax(dtype: torch.dtype) -> None:
    """Scores so far apart that one weight is 1: gradients are small rests of large terms."""
    case = Case(Hq=2, Hkv=2, S=300, D=64, dtype=dtype, scale=4.0, is_causal=True)
    tensors = case.tensors(random.randrange(2**31))
    exact, terms = dense(tensors, case.mask, case.scale), term_norms(tensors, case.mask, case.scale)
    for P in (1, 4):
        errors = relative_errors(run_virtual(case, tensors, P, "zigzag"), exact, terms)
        assert max(errors.values()) <= TOLERANCE[dtype], errors
