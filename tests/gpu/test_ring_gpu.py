"""virtual_ring_attention on a GPU, forward and backward: against dense float64 attention, and bits from run to run."""

from __future__ import annotations

import random

import pytest
import torch
from cases import LAYOUTS, Case, leaves, restride
from reference import Result, dense, same_bits

import ringattn_ext as ra

from .on_device import HALVES, attend, check, half_case, random_layout, to

KINDS = ("full", "causal", "window", "causal_window", "documents", "causal_documents")
RINGS = (1, 2, 3, 4, 8)
pytestmark = pytest.mark.timeout(300)


def prepared(case: Case, device: torch.device) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Fresh tensors of a case, on the CPU and on the device."""
    tensors = case.tensors(random.randrange(2**31), lse_gradient=False)
    return tensors, to(device, tensors)


def run(case: Case, moved: tuple[torch.Tensor, ...], P: int, layout: str, **options: object) -> Result:
    return attend(leaves(moved), moved[3], case, world_size=P, layout=layout, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("D", [40, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_masks_and_head_dims(device: torch.device, dtype: torch.dtype, D: int, kind: str) -> None:
    case = half_case(kind, dtype, D)
    tensors, moved = prepared(case, device)
    for P in RINGS:
        layout = random_layout()
        check(run(case, moved, P, layout), tensors, case, (P, layout))


@pytest.mark.parametrize("P", RINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_rings(device: torch.device, layout: str, P: int) -> None:
    for dtype in HALVES:
        case = half_case(random.choice(KINDS), dtype, random.choice((64, 128)))
        tensors, moved = prepared(case, device)
        check(run(case, moved, P, layout), tensors, case, (P, layout))


@pytest.mark.parametrize(("Hq", "Hkv"), [(1, 1), (3, 3), (4, 1), (6, 2), (8, 1), (9, 3)])
def test_grouped_queries(device: torch.device, Hq: int, Hkv: int) -> None:
    case = half_case("causal", random.choice(HALVES), 64, Hq=Hq, Hkv=Hkv)
    tensors, moved = prepared(case, device)
    for P in (1, 3):
        check(run(case, moved, P, "zigzag"), tensors, case, P)


@pytest.mark.parametrize("S", [1, 2, 7, 63, 64, 65, 127, 129, 1000])
def test_lengths(device: torch.device, S: int) -> None:
    case = half_case("causal", random.choice(HALVES), 64, S=S)
    tensors, moved = prepared(case, device)
    for P in (1, 2, 8):  # shards may be empty
        check(run(case, moved, P, random_layout()), tensors, case, P)


def test_no_tokens(device: torch.device) -> None:
    x = torch.randn(2, 2, 0, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    out, lse = ra.virtual_ring_attention(x, x, x, world_size=2, is_causal=True, return_lse=True)
    assert out.shape == x.shape and lse.shape == (2, 2, 0)
    (out.sum() + lse.sum()).backward()
    assert x.grad is not None and x.grad.shape == x.shape


@pytest.mark.parametrize("strides", ["transposed", "packed", "padded", "stepping"])
def test_strides(device: torch.device, strides: str) -> None:
    case = half_case("causal", torch.bfloat16, 64)
    tensors, moved = prepared(case, device)
    views = tuple(restride(t, strides) for t in moved[:4])
    for P in (1, 3):
        check(run(case, views, P, "zigzag"), tensors, case, (P, strides))


def test_gradient_of_lse(device: torch.device) -> None:
    """d(lse)/d(query) against the dense one; the gradient of the output is 0."""
    case = half_case("causal", torch.bfloat16, 64)
    tensors = case.tensors(random.randrange(2**31))
    exact = dense_gradient_of_lse(case, tensors)
    query, key, value = leaves(to(device, tensors))
    _, lse = ra.virtual_ring_attention(query, key, value, world_size=2, return_lse=True, **case.options())
    got = torch.autograd.grad(lse, query, tensors[4].to(device))[0].cpu().double()
    assert float((got - exact).norm()) <= 0.01 * float(exact.norm())


def dense_gradient_of_lse(case: Case, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    zero = torch.zeros_like(tensors[3])
    return dense((*tensors[:3], zero, tensors[4]), case.mask, case.scale).dq


@pytest.mark.parametrize("kind", KINDS)
def test_bits_from_run_to_run(device: torch.device, kind: str) -> None:
    case = half_case(kind, random.choice(HALVES), random.choice((40, 64, 128)), S=500)
    _, moved = prepared(case, device)
    for P in (1, 4):
        first = run(case, moved, P, "zigzag", deterministic=True)
        for _ in range(3):
            again = run(case, moved, P, "zigzag", deterministic=True)
            for name in Result._fields:
                assert same_bits(getattr(first, name), getattr(again, name)), (name, P, case)


@pytest.mark.parametrize("P", [1, 3])
def test_not_deterministic(device: torch.device, P: int) -> None:
    case = half_case("causal", torch.bfloat16, 64)
    tensors, moved = prepared(case, device)
    check(run(case, moved, P, "zigzag", deterministic=False), tensors, case, P)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_one_gradient_alone(device: torch.device, name: str) -> None:
    """Has the bits that it has beside the others."""
    case = half_case("causal", torch.bfloat16, 64)
    _, moved = prepared(case, device)
    whole = run(case, moved, 3, "zigzag")
    i = ("query", "key", "value").index(name)
    inputs = [t.detach().requires_grad_(k == i) for k, t in enumerate(moved[:3])]
    out = ra.virtual_ring_attention(*inputs, world_size=3, layout="zigzag", **case.options())
    (got,) = torch.autograd.grad(out, inputs[i : i + 1], moved[3])
    assert same_bits(got, (whole.dq, whole.dk, whole.dv)[i])


def test_long_sequence(device: torch.device) -> None:
    """Rings of 1 and 8 on 8192 tokens against each other, with the error that the smaller cases may have."""
    S = 8192 if device.type == "cuda" else 1024
    case = Case(Hq=4, Hkv=2, S=S, D=128, dtype=torch.bfloat16, is_causal=True)
    _, moved = prepared(case, device)
    one, eight = (run(case, moved, P, "zigzag") for P in (1, 8))
    for name in Result._fields:
        a, b = getattr(one, name).double(), getattr(eight, name).double()
        assert float((a - b).norm()) <= 0.01 * float(a.norm()), name
