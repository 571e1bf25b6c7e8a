"""Cutting whole tensors into the parts of the ranks, putting them together again, and where a rank's tokens lie."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringattn_ext._arguments import integer, optional_integer, tensor, text
from ringattn_ext._C import Layout
from ringattn_ext._groups import constant_in_compiled_code, group_name, rank_and_size
from ringattn_ext._ops import order, ring_call


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, name: str, layout: str) -> Tensor:
        part = torch.ops.ringattn.shard(x, dim, name, layout)
        ctx.call = (dim, name, layout, x.shape[dim])
        ctx.generation = None if torch.compiler.is_compiling() else torch.ops.ringattn.generation(name)
        return part

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        where = ctx.call
        generation = ctx.generation
        gather = torch.ops.ringattn.gather
        return ring_call(where[1], lambda: gather(gradient, order(), *where, generation), gradient), None, None, None


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, name: str, layout: str, seq_len: int | None) -> Tensor:
        ctx.call = (dim, name, layout)
        return torch.ops.ringattn.gather(x, order(), dim, name, layout, seq_len)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.ops.ringattn.shard(gradient, *ctx.call), None, None, None, None


def shard(x: Tensor, dim: int, *, group: object = None, layout: str = "zigzag") -> Tensor:
    """This rank's part of a whole tensor: its tokens along `dim`, in the rank's local order.

    Args:
        x: the whole tensor, any dtype, the same on every rank; S tokens along `dim`. Any S works.
        dim: the dimension of the tokens; negative counts from the end.
        group, layout: as for `ring_attention`.

    Returns:
        A new contiguous tensor with this rank's S_local tokens along `dim`.

    The backward pass assembles the whole gradient on every rank, from the parts of all; every rank must make it.

    Raises ValueError or TypeError for bad arguments, RingError if ranks disagree in the backward pass.
    """
    return _Shard.apply(tensor("x", x), integer("dim", dim), group_name(group), text("layout", layout))


def unshard(x: Tensor, dim: int, *, group: object = None, layout: str = "zigzag", seq_len: int | None = None) -> Tensor:
    """The whole tensor, on every rank, from the parts of all ranks. Every rank of the group must make the call.

    Args:
        x: this rank's part, any dtype; S_local tokens along `dim`.
        dim: the dimension of the tokens; negative counts from the end.
        group, layout: as for `ring_attention`.
        seq_len: the number of tokens of the whole tensor; may be left out when all ranks hold the same number.

    Returns:
        A new contiguous tensor with seq_len tokens along `dim`.

    The backward pass takes this rank's part of the gradient: the loss is meant to be the same on every rank, so that
    each rank already has the whole gradient. Nothing is communicated.

    Raises ValueError or TypeError for bad arguments (the other ranks: RingError), RingError if ranks disagree.
    """
    name = group_name(group)
    return ring_call(
        name,
        lambda: _Unshard.apply(
            tensor("x", x), integer("dim", dim), name, text("layout", layout), optional_integer("seq_len", seq_len)
        ),
        x,
    )


@constant_in_compiled_code
def _segments(layout: str, world_size: int, seq_len: int, rank: int) -> tuple[tuple[int, int, int], ...]:
    """start, stride and length of a rank's runs of tokens."""
    segments = Layout(layout, world_size, seq_len).segments(rank)
    return tuple((segment.start, segment.stride, segment.length) for segment in segments)


def positions(
    seq_len: int,
    *,
    layout: str = "zigzag",
    group: object = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Tensor:
    """The global positions of a rank's tokens, in its local order: what RoPE, labels and masks need.

    Args:
        seq_len: the number of tokens of the whole sequence.
        layout: "contiguous", "zigzag" or "striped".
        group: as for `ring_attention`; gives rank and world size unless both are given.
        rank, world_size: instead of a group, for any rank of a ring of any size. Both or neither.

    Returns:
        [S_local], int64, on the CPU.

    Raises ValueError for an unknown layout, a negative length, or a rank outside the ring.
    """
    if (rank is None) != (world_size is None):
        raise ValueError("rank, world_size: expected both or neither")
    if rank is None or world_size is None:
        rank, world_size = rank_and_size(group_name(group))
    elif group is not None:
        raise ValueError("group: expected None where rank and world_size are given")
    numbers = (integer("world_size", world_size), integer("seq_len", seq_len), integer("rank", rank))
    runs = [
        torch.arange(start, start + stride * length, stride, dtype=torch.int64, device="cpu")
        for start, stride, length in _segments(text("layout", layout), *numbers)
    ]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device="cpu")
