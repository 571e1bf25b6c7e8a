"""ring_attention and virtual_ring_attention: the differentiable faces of the ring operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ringattn_ext._groups import group_name, refuse
from ringattn_ext._ops import order, with_ring_errors


class _Options(NamedTuple):
    """What both directions of a pass are told beside the tensors, in the order of the operators' arguments."""

    is_causal: bool
    window: list[int] | None
    cu_seqlens: Tensor | None
    scale: float | None
    enable_gqa: bool
    deterministic: bool
    needs_grad: list[bool]


class _RingAttention(torch.autograd.Function):
    """Forward and backward on the ranks of a group. `where`: group name, layout, seq_len, key_seq_len."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, where: tuple, options: _Options) -> Any:
        out, lse, kept = with_ring_errors(
            torch.ops.ringattn.ring_forward, query, key, value, order(), *where, *options
        )
        _save(ctx, (query, key, value, out, lse, kept), where, options)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        saved, where, options = _restore(ctx)
        grad_out = _materialized(grad_out, saved[3])
        gradients = with_ring_errors(
            torch.ops.ringattn.ring_backward, grad_out, grad_lse, *saved, order(), *where, *options
        )
        return *_wanted(gradients, options), None, None


class _VirtualRingAttention(torch.autograd.Function):
    """The same on virtual ranks. `where`: world_size, layout."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, where: tuple, options: _Options) -> Any:
        out, lse, kept = with_ring_errors(torch.ops.ringattn.virtual_ring_forward, query, key, value, *where, *options)
        _save(ctx, (query, key, value, out, lse, kept), where, options)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        saved, where, options = _restore(ctx)
        grad_out = _materialized(grad_out, saved[3])
        gradients = with_ring_errors(
            torch.ops.ringattn.virtual_ring_backward, grad_out, grad_lse, *saved, *where, *options
        )
        return *_wanted(gradients, options), None, None


def _save(ctx: Any, tensors: tuple[Tensor, ...], where: tuple, options: _Options) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, options.cu_seqlens)
    ctx.where = where
    ctx.options = options._replace(cu_seqlens=None)


def _restore(ctx: Any) -> tuple[tuple[Tensor, ...], tuple, _Options]:
    *tensors, cu_seqlens = ctx.saved_tensors
    return tuple(tensors), ctx.where, ctx.options._replace(cu_seqlens=cu_seqlens)


def _materialized(grad_out: Tensor | None, out: Tensor) -> Tensor:
    return torch.zeros_like(out) if grad_out is None else grad_out


def _wanted(gradients: Sequence[Tensor], options: _Options) -> list[Tensor | None]:
    return [gradient if needed else None for gradient, needed in zip(gradients, options.needs_grad, strict=True)]


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: object = None,
    layout: str = "zigzag",
    seq_len: int | None = None,
    key_seq_len: int | None = None,
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    deterministic: bool = True,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence whose tokens are cut over the ranks of a group.

    Each rank passes the queries, keys and values of its own tokens and gets the output of its own queries. Keys and
    values travel round the ring of ranks; no rank ever holds more than two blocks of them. Every rank of the group must
    make the call, with the same options, and its backward pass if any rank does.

    Args:
        query: [B, Hq, S_local, D], float64, float32, bfloat16 or float16; 1 <= D <= 256. Any strides; if the last one
            is not 1, a copy is made.
        key, value: [B, Hkv, S_local, D] of the same dtype and device; Hq must be a multiple of Hkv.
        group: None (the world group, or a ring of one if torch.distributed is not initialised), a ProcessGroup, a
            group name, or a one-dimensional DeviceMesh. The order of the ring is the rank in the group.
        layout: "contiguous", "zigzag" or "striped": which tokens this rank holds; see `positions`.
        seq_len: the number of tokens of the whole sequence. May be left out when all ranks hold the same number.
        key_seq_len: the same for the keys, for cross attention; left out, as many as queries if the local numbers
            agree. Unequal lengths allow the full mask only.
        is_causal: the query at global position p attends to keys at positions <= p.
        window: (left, right) in tokens: only keys from p - left to p + right; -1: unbounded. With is_causal, right is 0.
        cu_seqlens: [documents + 1], int32 or int64: boundaries of packed documents over the whole sequence, from 0 to
            seq_len, the same on every rank. A query attends to its own document alone. Empty documents are allowed.
        scale: the factor on q.k before the softmax, finite and > 0. Default: D ** -0.5.
        enable_gqa: must be True for Hq != Hkv: query head h then uses key/value head h // (Hq // Hkv).
        deterministic: on the CPU results are always bitwise reproducible for a given ring.
        return_lse: also return the log of the softmax denominator.

    Returns:
        out [B, Hq, S_local, D] in the dtype of the inputs. With return_lse: (out, lse), lse [B, Hq, S_local] in natural
        logarithm, float64 for float64 inputs and float32 otherwise. A query that may see no key gives 0 and -inf.
        Both are differentiable, once.

    Raises:
        ValueError, TypeError: this rank's arguments are bad. The other ranks raise RingError.
        RingError: ranks disagree about the call, another rank refused its input, or communication failed. After a
            disagreement or a refusal the group stays usable.

    Source: Liu, Zaharia, Abbeel: Ring Attention with Blockwise Transformers for Near-Infinite Context
    (arXiv:2310.01889); online softmax: Milakov, Gimelshein (arXiv:1805.02867).
    """
    name = group_name(group)
    try:
        query, key, value = _autocast(query, key, value)
        options = _options(query, key, value, is_causal, window, cu_seqlens, scale, enable_gqa, deterministic)
        where = (name, _text("layout", layout), _count("seq_len", seq_len), _count("key_seq_len", key_seq_len))
    except (TypeError, ValueError) as error:
        refuse(name, error)
        raise
    out, lse = _RingAttention.apply(query, key, value, where, options)
    return (out, lse) if return_lse else out


def virtual_ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    world_size: int,
    layout: str = "zigzag",
    is_causal: bool = False,
    window: tuple[int, int] | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    deterministic: bool = True,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """ring_attention of `world_size` virtual ranks in this process: whole tensors in, whole tensors out.

    The tensors are cut as `layout` says, and every virtual rank runs the code of a real one, in a thread of its own,
    over a transport that copies memory. The threads share torch.get_num_threads(). For debugging, and to see what a
    ring of up to 1024 ranks computes on a machine that has not so many.

    Arguments as for `ring_attention`, with S instead of S_local. Raises ValueError and TypeError for bad arguments.
    """
    query, key, value = _autocast(query, key, value)
    options = _options(query, key, value, is_causal, window, cu_seqlens, scale, enable_gqa, deterministic)
    size = _count("world_size", world_size)
    if size is None:
        raise TypeError("world_size: expected an int, got None")
    where = (size, _text("layout", layout))
    out, lse = _VirtualRingAttention.apply(query, key, value, where, options)
    return (out, lse) if return_lse else out


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """As scaled_dot_product_attention: under autocast, floating-point inputs except float64 take the autocast dtype."""
    for name, tensor in zip(("query", "key", "value"), tensors, strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a Tensor, got {type(tensor).__name__}")
        if tensor.device != tensors[0].device:
            raise ValueError(f"{name}: expected the device of query, {tensors[0].device}, got {tensor.device}")
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors]


def _options(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: object,
    window: object,
    cu_seqlens: object,
    scale: object,
    enable_gqa: object,
    deterministic: object,
) -> _Options:
    """The options in the types of the operators' schemas. Their values are checked in C++."""
    if cu_seqlens is not None and not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens: expected a Tensor or None, got {type(cu_seqlens).__name__}")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise TypeError(f"scale: expected a float or None, got {type(scale).__name__}")
    grad = torch.is_grad_enabled()
    return _Options(
        _flag("is_causal", is_causal),
        _window(window),
        cu_seqlens,
        None if scale is None else float(scale),
        _flag("enable_gqa", enable_gqa),
        _flag("deterministic", deterministic),
        [grad and tensor.requires_grad for tensor in (query, key, value)],
    )


def _window(window: object) -> list[int] | None:
    if window is None:
        return None
    if not isinstance(window, Sequence) or isinstance(window, str):
        raise TypeError(f"window: expected (left, right) or None, got {type(window).__name__}")
    if any(isinstance(side, bool) or not isinstance(side, int) for side in window):
        raise TypeError(f"window: expected two ints, got {window!r}")
    return list(window)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a str, got {type(value).__name__}")
    return value


def _count(name: str, value: Any) -> int | None:
    if value is None or isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        return value
    raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
