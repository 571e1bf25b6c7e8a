"""How the attention functions live with autograd: the same checks in a ring of one, on virtual ranks, on processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from reference import same_bits
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringattn_ext as ra

pytestmark = pytest.mark.timeout(120)
WHERE = ["ring of one", "virtual ranks", "processes"]


def attention(where: str) -> Callable[..., Tensor]:
    if where == "virtual ranks":
        return partial(ra.virtual_ring_attention, world_size=3, is_causal=True, enable_gqa=True)
    return partial(ra.ring_attention, is_causal=True, enable_gqa=True)


def run(where: str, check: Callable[..., None], *args: object) -> None:
    """check(attend, *args) here, or on two processes, where the inputs are the parts of each."""
    seed = random.randrange(2**31)
    if where == "processes":
        run_ranks(2, on_rank, check, seed, args)
    else:
        torch.manual_seed(seed)
        check(attention(where), *args)


def on_rank(check: Callable[..., None], seed: int, args: tuple) -> None:
    torch.manual_seed(seed)
    check(attention("processes"), *args)


def inputs(dtype: torch.dtype = torch.float32, wanted: tuple[bool, ...] = (True, True, True)) -> list[Tensor]:
    shapes = [(2, 4, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16)]
    return [torch.randn(shape).to(dtype).requires_grad_(want) for shape, want in zip(shapes, wanted, strict=True)]


def all_same(got: tuple, expected: tuple) -> bool:
    return all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


def check_only_wanted(attend: Callable[..., Tensor]) -> None:
    for wanted in product((False, True), repeat=3):
        tensors = inputs(wanted=wanted)
        out = attend(*tensors)
        assert out.requires_grad == any(wanted)
        if not any(wanted):
            continue
        grad = torch.randn_like(out)
        out.backward(grad)
        everything = [t.detach().requires_grad_() for t in tensors]
        attend(*everything).backward(grad)
        for tensor, other, want in zip(tensors, everything, wanted, strict=True):
            if want:
                assert tensor.grad is not None and other.grad is not None and same_bits(tensor.grad, other.grad)
            else:
                assert tensor.grad is None


@pytest.mark.parametrize("where", WHERE)
def test_gradients_only_where_wanted(where: str) -> None:
    run(where, check_only_wanted)


def check_requested(attend: Callable[..., Tensor]) -> None:
    """autograd.grad for a part of the inputs that require gradients."""
    tensors = inputs()
    out = attend(*tensors)
    grad = torch.randn_like(out)
    (dk,) = torch.autograd.grad(out, tensors[1], grad, retain_graph=True)
    assert same_bits(dk, torch.autograd.grad(out, tensors, grad)[1])


@pytest.mark.parametrize("where", WHERE)
def test_a_part_of_the_gradients(where: str) -> None:
    run(where, check_requested)


def check_twice(attend: Callable[..., Tensor]) -> None:
    tensors = inputs()
    out, lse = attend(*tensors, return_lse=True)
    grads = torch.randn_like(out), torch.randn_like(lse)
    first = torch.autograd.grad((out, lse), tensors, grads, retain_graph=True)
    second = torch.autograd.grad((out, lse), tensors, grads)
    assert all_same(first, second)
    with pytest.raises(RuntimeError, match="second time|freed"):
        torch.autograd.grad((out, lse), tensors, grads)


@pytest.mark.parametrize("where", WHERE)
def test_backward_twice(where: str) -> None:
    run(where, check_twice)


def check_backward_in_another_order(attend: Callable[..., Tensor]) -> None:
    """Calls in flight at the same time, their backwards in the order of the calls instead of the reverse."""
    tensors = [inputs() for _ in range(3)]
    outs = [attend(*t) for t in tensors]
    grads = [torch.randn_like(out) for out in outs]
    got = [torch.autograd.grad(o, t, g) for o, t, g in zip(outs, tensors, grads, strict=True)]
    for t, g, expected in zip(tensors, grads, got, strict=True):
        assert all_same(torch.autograd.grad(attend(*t), t, g), expected)


@pytest.mark.parametrize("where", WHERE)
def test_backward_in_any_order(where: str) -> None:
    run(where, check_backward_in_another_order)


def check_checkpoint(attend: Callable[..., Tensor], use_reentrant: bool) -> None:
    tensors = inputs()

    def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query.sin(), key.sin(), value.sin()).cos()

    grad = torch.randn_like(tensors[0])
    expected = (layer(*tensors), *torch.autograd.grad(layer(*tensors), tensors, grad))
    out = checkpoint(layer, *tensors, use_reentrant=use_reentrant)
    out.backward(grad)
    assert all_same((out, *(t.grad for t in tensors)), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("where", WHERE)
def test_activation_checkpointing(where: str, use_reentrant: bool) -> None:
    run(where, check_checkpoint, use_reentrant)


def check_without_gradients(attend: Callable[..., Tensor]) -> None:
    tensors = inputs()
    expected = attend(*tensors, return_lse=True)
    with torch.no_grad():
        got = attend(*tensors, return_lse=True)
    assert all_same(got, expected) and not any(t.requires_grad for t in got)
    with torch.inference_mode():
        got = attend(*tensors, return_lse=True)
        assert all(t.is_inference() for t in got)
        fresh = attend(*(t.detach().clone() for t in tensors))
    assert all_same((*got, fresh), (*expected, expected[0]))
    with torch.no_grad():
        out = attend(*tensors)
    assert out.grad_fn is None


@pytest.mark.parametrize("where", WHERE)
def test_no_grad_and_inference_mode(where: str) -> None:
    run(where, check_without_gradients)


def check_autocast(attend: Callable[..., Tensor], autocast_dtype: torch.dtype) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        tensors = inputs(dtype)
        with torch.autocast("cpu", autocast_dtype):
            out = attend(*tensors)
            like = F.scaled_dot_product_attention(*inputs(dtype), is_causal=True, enable_gqa=True)
        assert out.dtype == like.dtype
        grad = torch.randn_like(out)
        by_hand = [t.detach().to(out.dtype).requires_grad_() for t in tensors]
        expected = attend(*by_hand)
        assert same_bits(out, expected)
        out.backward(grad)
        expected.backward(grad)
        for tensor, hand in zip(tensors, by_hand, strict=True):
            assert tensor.grad is not None and hand.grad is not None
            assert same_bits(tensor.grad, hand.grad.to(dtype))
    mixed = inputs()
    with torch.autocast("cpu", autocast_dtype):  # a projection in the autocast type beside float32
        assert attend(mixed[0].to(autocast_dtype), *mixed[1:]).dtype == autocast_dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("where", WHERE)
def test_autocast(where: str, dtype: torch.dtype) -> None:
    run(where, check_autocast, dtype)


def test_autocast_gives_what_sdpa_gives() -> None:
    tensors = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = ra.virtual_ring_attention(*tensors, world_size=3, is_causal=True, enable_gqa=True)
        like = F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    assert out.dtype == like.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), like.float(), rtol=2e-2, atol=2e-2)


def check_second_derivative(attend: Callable[..., Tensor]) -> None:
    tensors = inputs()
    out, lse = attend(*tensors, return_lse=True)
    first = torch.autograd.grad(out.square().sum() + lse.sum(), tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        sum(g.square().sum() for g in first).backward()
    # Also where the gradient that flows into the first backward pass is a constant.
    first = torch.autograd.grad(attend(*tensors).sum(), tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        sum(g.square().sum() for g in first).backward()
    attend(*tensors).sum().backward()  # the ring goes on
    assert all(t.grad is not None for t in tensors)


@pytest.mark.parametrize("where", WHERE)
def test_second_derivative_raises(where: str) -> None:
    run(where, check_second_derivative)


def check_expanded_gradient(attend: Callable[..., Tensor]) -> None:
    tensors = inputs()
    out = attend(*tensors)
    got = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    assert all_same(torch.autograd.grad(out, tensors, torch.ones_like(out)), got)


@pytest.mark.parametrize("where", WHERE)
def test_gradient_of_a_sum(where: str) -> None:
    run(where, check_expanded_gradient)


def check_outputs(attend: Callable[..., Tensor]) -> None:
    tensors = inputs()
    out = attend(*tensors)
    both = attend(*tensors, return_lse=True)
    assert isinstance(out, Tensor) and isinstance(both, tuple) and len(both) == 2
    assert same_bits(out, both[0]) and both[1].dtype == torch.float32 and both[1].shape == (2, 4, 24)

    # lse alone; out alone; a gradient of zeros for the other says the same
    grad = torch.randn_like(both[1])
    got = torch.autograd.grad(both[1], tensors, grad, retain_graph=True)
    same = torch.autograd.grad(both, tensors, (torch.zeros_like(out), grad), retain_graph=True)
    assert all_same(got, same)
    assert all(bool(g.any()) for g in got[:2]) and not bool(got[2].any())  # lse does not depend on the values
    grad = torch.randn_like(out)
    alone = torch.autograd.grad(both[0], tensors, grad)
    assert all_same(torch.autograd.grad(out, tensors, grad), alone)


@pytest.mark.parametrize("where", WHERE)
def test_either_output_alone(where: str) -> None:
    run(where, check_outputs)


def check_same_tensor(attend: Callable[..., Tensor]) -> None:
    x = torch.randn(2, 4, 24, 16, requires_grad=True)
    out = attend(x, x, x)
    grad = torch.randn_like(out)
    (got,) = torch.autograd.grad(out, x, grad)
    three = [x.detach().clone().requires_grad_() for _ in range(3)]
    other = attend(*three)
    assert same_bits(out, other)
    expected = sum(torch.autograd.grad(other, three, grad))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("where", WHERE)
def test_the_same_tensor_three_times(where: str) -> None:
    run(where, check_same_tensor)


def check_inputs_untouched(attend: Callable[..., Tensor]) -> None:
    tensors = inputs()
    before = [t.detach().clone() for t in tensors]
    out = attend(*tensors)
    grad = torch.randn_like(out)
    kept = grad.clone()
    out.backward(grad)
    assert all_same((*tensors, grad), (*before, kept))
    with torch.no_grad():
        tensors[1].mul_(2.0)
    out = attend(*tensors)
    with torch.no_grad():
        tensors[1].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(grad)


@pytest.mark.parametrize("where", WHERE)
def test_inputs_are_saved_not_changed(where: str) -> None:
    run(where, check_inputs_untouched)


def check_documents_are_saved(attend: Callable[..., Tensor], total: int) -> None:
    """A change of cu_seqlens between forward and backward is refused, as one of the inputs is."""
    tensors = inputs()
    bounds = torch.tensor([0, 5, total])
    grad = torch.randn_like(tensors[0])
    out = attend(*tensors, cu_seqlens=bounds)
    bounds[1] = 9
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, tensors, grad)


@pytest.mark.parametrize("where", WHERE)
def test_documents_are_saved(where: str) -> None:
    run(where, check_documents_are_saved, 48 if where == "processes" else 24)
