"""The reference itself: against scaled_dot_product_attention in float64, and that its measures see what they should."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from cases import MASKS, random_case
from reference import Result, attention, attention_by_rows, dense, relative_errors, same_bits, visible
from torch.nn.attention import SDPBackend, sdpa_kernel


@pytest.mark.parametrize("kind", MASKS)
def test_against_sdpa(kind: str) -> None:
    case = random_case(kind, S=random.randint(5, 60))
    tensors = case.tensors(random.randrange(2**31), lse_gradient=False)
    mine = dense(tensors, case.mask, case.scale)
    leaves = [t.requires_grad_() for t in tensors[:3]]
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*leaves, attn_mask=case.mask, scale=case.scale, enable_gqa=True)
    torch.testing.assert_close(mine.out, out.detach())
    for got, expected in zip(mine[2:], torch.autograd.grad(out, leaves, tensors[3]), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("kind", MASKS)
def test_row_by_row(kind: str) -> None:
    case = random_case(kind, S=random.randint(5, 60))
    tensors = case.tensors(random.randrange(2**31))
    a, b = (dense(tensors, case.mask, case.scale, by_rows=by_rows) for by_rows in (False, True))
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-10)


def test_masks() -> None:
    assert visible(3, 3, is_causal=True).tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert visible(3, 3, window=(1, 0)).tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert visible(3, 3, window=(0, 1)).tolist() == [[1, 1, 0], [0, 1, 1], [0, 0, 1]]
    assert visible(3, 3, is_causal=True, window=(1, 2)).tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert visible(3, 3, cu_seqlens=(0, 0, 1, 3)).tolist() == [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
    assert visible(2, 0).shape == (2, 0)


@pytest.mark.parametrize("function", [attention, attention_by_rows])
def test_rows_without_keys(function) -> None:
    q, k, v = (torch.randn(1, 1, n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 4, 4))
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1, :2] = True
    out, lse = function(q, k, v, mask, 0.5)
    assert lse.isinf().tolist() == [[[True, False, True]]] and bool((out[:, :, [0, 2]] == 0).all())
    for gradient in torch.autograd.grad(out.sum() + lse[0, 0, 1], (q, k, v)):
        assert bool(gradient.isfinite().all())


def test_measures() -> None:
    exact = Result(*(torch.randn(1, 1, 3, 2, dtype=torch.float64) for _ in range(5)))
    assert set(relative_errors(exact, exact, {}).values()) == {0.0}
    for name in Result._fields:
        for wrong in (float("nan"), float("inf"), 9.0):
            tensor = getattr(exact, name).clone()
            tensor[0, 0, 1] = wrong
            errors = relative_errors(exact._replace(**{name: tensor}), exact, {})
            assert errors.pop(name) > 0.1 and set(errors.values()) == {0.0}
    empty = exact._replace(lse=torch.full_like(exact.lse, -torch.inf))
    assert relative_errors(empty, empty, {})["lse"] == 0.0
    with pytest.raises(AssertionError, match="lse"):
        relative_errors(exact, empty, {})
    nan = torch.tensor(float("nan"))
    assert same_bits(nan, nan.clone()) and not same_bits(torch.tensor(0.0), torch.tensor(-0.0))
