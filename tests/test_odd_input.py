"""Odd input that is legal: strange strides, one tensor in several roles, nothing to do, numbers of other kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from small_call import HKV, HQ, INPUTS, TOKENS, assert_near, inputs, padded, prove, small_call

import ringattn_ext as ra

pytestmark = pytest.mark.timeout(90)

RANKS_TIMEOUT = 25.0

Call = dict[str, Any]


def dense(call: Call) -> torch.Tensor:
    return F.scaled_dot_product_attention(*(call[x].double() for x in INPUTS), enable_gqa=True)


EMPTY = torch.tensor([0, 0, 0, TOKENS, TOKENS])
ODD: dict[str, Callable[[Call], Call]] = {
    "expanded batch": lambda call: {x: call[x][:1].expand(2, -1, -1, -1) for x in INPUTS},
    "expanded heads": lambda call: {
        "key": call["key"][:, :1].expand(-1, HQ, -1, -1),
        "value": call["value"][:, :1].expand(-1, HQ, -1, -1),
    },
    "stride 0 everywhere": lambda call: {x: torch.ones(()).expand(call[x].shape) for x in INPUTS},
    "stride 0 over tokens": lambda call: {x: call[x][:, :, :1].expand(-1, -1, TOKENS, -1) for x in INPUTS},
    "last stride 0": lambda call: {x: call[x][..., :1].expand(-1, -1, -1, 8) for x in INPUTS},
    "last stride 2": lambda call: {x: call[x].repeat_interleave(2, 3)[..., ::2] for x in INPUTS},
    "head_dim 1 of a wide tensor": lambda call: {x: call[x][..., 3:4] for x in INPUTS},
    "transposed": lambda call: {x: call[x].transpose(1, 2).contiguous().transpose(1, 2) for x in INPUTS},
    "last two swapped": lambda call: {x: call[x].transpose(2, 3).contiguous().transpose(2, 3) for x in INPUTS},
    "unaligned": lambda call: {
        x: torch.cat((torch.zeros(1), call[x].flatten()))[1:].view(call[x].shape) for x in INPUTS
    },
    "all the same tensor": lambda call: {"key": call["query"], "value": call["query"]},
    "key is value": lambda call: {"value": call["key"]},
    "overlapping views": lambda call: {"key": call["query"][:, :HKV], "value": call["query"][:, 1 : HKV + 1]},
    "negated lazily": lambda call: {"query": torch._neg_view(call["query"])},
    "head_dim 256": lambda call: {x: call[x].repeat(1, 1, 1, 32) / 8 for x in INPUTS},
    "window larger than the sequence": lambda call: {"window": (1000, 2**40)},
    "window of the largest ints": lambda call: {"window": (2**63 - 1, 2**31 - 1)},
    "window as a list": lambda call: {"window": [-1, -1]},
    "one document": lambda call: {"cu_seqlens": torch.tensor([0, TOKENS])},
    "documents int32": lambda call: {"cu_seqlens": torch.tensor([0, TOKENS], dtype=torch.int32)},
    "documents with stride": lambda call: {"cu_seqlens": torch.tensor([0, 99, TOKENS, 99])[::2]},
    "empty documents": lambda call: {"cu_seqlens": EMPTY},
    "scale as an int": lambda call: {"scale": 1, "query": call["query"] / 8**0.5},
    "scale as a numpy float": lambda call: {"scale": np.float64(8**-0.5)},
    "seq_len as a numpy int": lambda call: {"seq_len": np.int64(TOKENS)},
    "a parameter": lambda call: {"query": torch.nn.Parameter(call["query"])},
}


def reference(id: str, call: Call) -> torch.Tensor:
    if id == "scale as an int":
        return dense(call | {"query": call["query"] * 8**0.5})
    return dense(call)


@pytest.mark.parametrize("world_size", [0, 1, 3], ids=["ring", "virtual1", "virtual3"])
@pytest.mark.parametrize("id", ODD)
def test_odd_and_legal(id: str, world_size: int) -> None:
    call = small_call(0, 1)
    call |= ODD[id](call)
    for x in INPUTS:
        call[x] = call[x].detach()
    leaves = [call[x] for x in INPUTS]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    if world_size:
        call.pop("seq_len")
        out = ra.virtual_ring_attention(**call, world_size=world_size)
    else:
        out = ra.ring_attention(**call)
    expected = reference(id, call)
    assert_near(out, expected)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    got = torch.autograd.grad((out * weights.float()).sum(), leaves)
    wanted = torch.autograd.grad((expected * weights).sum(), leaves)
    for a, b in zip(got, wanted, strict=True):
        assert_near(a, b)


@pytest.mark.parametrize("world_size", [0, 1, 3, 7], ids=lambda p: f"virtual{p}" if p else "ring")
@pytest.mark.parametrize(
    "mask",
    [{}, {"is_causal": True}, {"window": (2, 1)}, {"cu_seqlens": True}],
    ids=["full", "causal", "window", "documents"],
)
@pytest.mark.parametrize("shape", [(0, 4, 6, 8), (2, 4, 0, 8), (0, 4, 0, 8)], ids=str)
def test_nothing_to_do(shape: tuple[int, ...], mask: Call, world_size: int) -> None:
    """B = 0 and sequences without tokens: empty results, empty gradients."""
    tensors = [torch.randn(shape, requires_grad=True) for _ in INPUTS]
    if "cu_seqlens" in mask:
        mask = {"cu_seqlens": torch.tensor([0, 0, shape[2]])}
    call = dict(zip(INPUTS, tensors, strict=True)) | mask | {"return_lse": True}
    out, lse = ra.virtual_ring_attention(**call, world_size=world_size) if world_size else ra.ring_attention(**call)
    assert out.shape == shape and lse.shape == shape[:3] and lse.dtype == torch.float32
    gradients = torch.autograd.grad(out.sum() + lse.sum(), tensors)
    assert all(gradient.shape == shape for gradient in gradients)


def nothing_on_ranks(batch: int, seq_len: int, layout: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole, parts = inputs(rank, world_size, seq_len=seq_len, layout=layout, shape=(batch, HQ, HKV, 8))
    leaves = [part.detach().requires_grad_() for part in parts]
    out, lse = ra.ring_attention(
        *leaves, layout=layout, seq_len=seq_len, is_causal=True, enable_gqa=True, return_lse=True
    )
    own = ra.positions(seq_len, layout=layout)
    assert out.shape == parts[0].shape and lse.shape == out.shape[:3]
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    references = [tensor.double().requires_grad_() for tensor in whole]
    if batch and seq_len:
        dense = F.scaled_dot_product_attention(*references, is_causal=True, enable_gqa=True)
        expected = torch.autograd.grad(dense.square().sum(), references)
        assert_near(out, dense[:, :, own])
        for got, wanted in zip(gradients, expected, strict=True):
            assert_near(got, wanted[:, :, own])
    prove()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("batch, seq_len", [(0, 12), (2, 0), (2, 1), (2, 2)])
def test_nothing_on_some_ranks(batch: int, seq_len: int, layout: str, world_size: int) -> None:
    run_ranks(world_size, nothing_on_ranks, batch, seq_len, layout, timeout=RANKS_TIMEOUT)


def test_padding_of_views_is_not_read() -> None:
    """Inputs surrounded by NaN, as small_call makes them, give finite results."""
    call = small_call(0, 1)
    assert call["query"].storage_offset() > 0 and torch.isfinite(ra.ring_attention(**call)).all()
    assert torch.equal(padded(call["query"]), call["query"])
