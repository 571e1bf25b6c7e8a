"""Fake kernels: the shapes, dtypes and strides of the operators' results, for tracing.

The dispatcher also runs them if one of an operator's real tensors is on the meta device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringattn_ext._C import Layout
from ringattn_ext._groups import rank_and_size
from ringattn_ext._ops import refuse


def _rows_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """As empty_rows_like of ring/pass.h."""
    if tensor.dim() != 4:
        return tensor.new_empty(tensor.shape, dtype=dtype)  # raises when it runs
    B, H, S, D = tensor.shape
    if tensor.stride(3) == 1 and tensor.stride(1) < tensor.stride(2):
        return tensor.new_empty((B, S, H, D), dtype=dtype).transpose(1, 2)
    return tensor.new_empty((B, H, S, D), dtype=dtype)


def _accumulation_type(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _lse_like(query: Tensor) -> Tensor:
    return query.new_empty(query.shape[:-1], dtype=_accumulation_type(query))


def _check(group: str, **tensors: Tensor | None) -> None:
    """Refuses real tensors on the meta device, for which the other ranks wait. The first is what the others must fit.

    While tracing nothing is refused: bad input raises in the C++ checks, when the traced code runs.
    """
    from torch._subclasses.fake_tensor import FakeTensor  # here: it would double the time of importing the package

    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if any(isinstance(tensor, FakeTensor) for tensor in given.values()):
        return
    problem = _problem(group, given)
    if problem is not None:
        # A real tensor on the meta device stands where the others have theirs on another one.
        devices = {tensor.device for tensor in given.values() if tensor.device.type != "meta"} - {torch.device("cpu")}
        refuse(group, problem, devices.pop() if devices else torch.device("cpu"))
        raise ValueError(problem)


def _problem(group: str, tensors: dict[str, Tensor]) -> str | None:
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if name in ("order", "forward_call"):
            if tensor.device.type != "cpu":
                return f"{name}: expected one int64 number on the CPU, got one on {tensor.device}"
            continue
        if tensor.device != first.device and not (name == "cu_seqlens" and tensor.device.type == "cpu"):
            return f"{name}: expected the device of {first_name}, {first.device}, got {tensor.device}"
    if first.device.type == "meta" and rank_and_size(group)[1] > 1:
        return f"{first_name}: expected a device that has data to send round a ring, got meta"
    return None


def _kept_size(key: Tensor, world_size: int, layout: str, key_seq_len: int, needs_grad: list[bool]) -> int:
    """Elements of two packed blocks, with room for the longest: kept_size of ring/pass.cpp.

    Not by Layout.capacity, which needs a number: key_seq_len may be symbolic here. A test compares the two.
    """
    if world_size == 1 or key.dim() != 4 or not any(needs_grad):
        return 0
    pieces = 2 if layout == "zigzag" else 1
    chunks = pieces * world_size
    capacity = pieces * ((key_seq_len + chunks - 1) // chunks)
    B, Hkv, _, D = key.shape
    return 2 * B * Hkv * capacity * D


@torch.library.register_fake("ringattn::ring_forward")
def _(query, key, value, order, group, layout, seq_len, key_seq_len, is_causal, window, cu_seqlens, *options):
    _check(group, query=query, key=key, value=value, cu_seqlens=cu_seqlens, order=order)
    P = rank_and_size(group)[1]
    if key_seq_len is None:
        same = key.shape[-2] == query.shape[-2]
        key_seq_len = seq_len if seq_len is not None and same else key.shape[-2] * P
    kept = key.new_empty(_kept_size(key, P, layout, key_seq_len, options[-1]))
    return _rows_like(query), _lse_like(query), kept


@torch.library.register_fake("ringattn::virtual_ring_forward")
def _(query, key, value, world_size, layout, is_causal, window, cu_seqlens, *options):
    _check("", query=query, key=key, value=value, cu_seqlens=cu_seqlens)
    kept = key.new_empty((world_size, _kept_size(key, world_size, layout, key.shape[-2], options[-1])))
    return _rows_like(query), _lse_like(query), kept


@torch.library.register_fake("ringattn::ring_backward")
def _(grad_out, grad_lse, query, key, value, out, lse, kept, forward_call, order, group, layout, *options):
    tensors = {"grad_out": grad_out, "grad_lse": grad_lse, "out": out, "lse": lse, "kept": kept}
    _check(group, query=query, key=key, value=value, **tensors, forward_call=forward_call, order=order)
    return _gradients(query, key, value, options[-1])


@torch.library.register_fake("ringattn::virtual_ring_backward")
def _(grad_out, grad_lse, query, key, value, out, lse, kept, world_size, layout, *options):
    _check("", query=query, key=key, value=value, grad_out=grad_out, grad_lse=grad_lse, out=out, lse=lse, kept=kept)
    return _gradients(query, key, value, options[-1])


def _gradients(query: Tensor, key: Tensor, value: Tensor, needs_grad: list[bool]) -> tuple[Tensor, ...]:
    return tuple(
        _rows_like(tensor) if needed else query.new_empty(0)
        for tensor, needed in zip((query, key, value), needs_grad, strict=True)
    )


@torch.library.register_fake("ringattn::shard")
def _(whole, dim, group, layout):
    rank, world_size = rank_and_size(group)
    shape = list(whole.shape)
    shape[dim] = Layout(layout, world_size, int(shape[dim])).length(rank)
    return whole.new_empty(shape)


@torch.library.register_fake("ringattn::gather")
def _(part, order, dim, group, layout, seq_len, generation=None):
    _check(group, x=part, order=order)
    shape = list(part.shape)
    shape[dim] = shape[dim] * rank_and_size(group)[1] if seq_len is None else seq_len
    return part.new_empty(shape)


@torch.library.register_fake("ringattn::refuse")
def _(order, group, reason, payload):
    return None


@torch.library.register_fake("ringattn::init")
def _(order, group, device):
    return None


@torch.library.register_fake("ringattn::block_forward_")
def _(o, m, l, query, key, value, query_segments, key_segments, key_seq_len, is_causal, window, cu_seqlens, *options):  # noqa: E741
    _check("", query=query, key=key, value=value, o=o, m=m, l=l, cu_seqlens=cu_seqlens)
    finalize = options[-1]
    if finalize:
        return _rows_like(query), torch.empty_like(m)
    return query.new_empty(0), o.new_empty(0)


@torch.library.register_fake("ringattn::block_backward_")
def _(grad_query, grad_key, grad_value, grad_out, query, key, value, lse, delta, *options):
    accumulators = {"grad_query": grad_query, "grad_key": grad_key, "grad_value": grad_value}
    _check("", query=query, key=key, value=value, grad_out=grad_out, lse=lse, delta=delta, **accumulators)


@torch.library.register_fake("ringattn::delta")
def _(out, grad_out, grad_lse):
    _check("", out=out, grad_out=grad_out, grad_lse=grad_lse)
    return _lse_like(out)


@torch.library.register_fake("ringattn::merge_")
def _(o, m, l, other_o, other_m, other_l, scale):  # noqa: E741
    _check("", o=o, m=m, l=l, other_o=other_o, other_m=other_m, other_l=other_l)


@torch.library.register_fake("ringattn::finalize")
def _(o, m, l, scale, dtype):  # noqa: E741
    _check("", o=o, m=m, l=l)
    return o.new_empty(o.shape, dtype=dtype), torch.empty_like(m)
