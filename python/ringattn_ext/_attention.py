"""ring_attention and virtual_ring_attention: the differentiable faces of the ring operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn_ext._arguments import flag, integer, optional_integer, real, tensor, text, type_name
from ringattn_ext._groups import group_name
from ringattn_ext._ops import order, ring_call


class _Options(NamedTuple):
    """What both directions of a pass are told beside the tensors, in the order of the operators' arguments."""

    is_causal: bool
    window: list[int] | None
    cu_seqlens: Tensor | None
    scale: float | None
    enable_gqa: bool
    deterministic: bool
    needs_grad: list[bool]


class _Place(NamedTuple):
    """Where a pass runs: on the ranks of a group, or on virtual ranks (world_size is set)."""

    group: str
    layout: str
    seq_len: int | None = None
    key_seq_len: int | None = None
    world_size: int | None = None


class _Once(torch.autograd.Function):
    """Gradients that depend on `inputs` but cannot be differentiated again: asking for it raises, even where the
    gradients that would flow back into this one are constants."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        return compute()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        raise RuntimeError("ring_attention cannot be differentiated twice")


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, place: _Place, options: _Options) -> Any:
        if place.world_size is None:
            number = order()
            where = (number, place.group, place.layout, place.seq_len, place.key_seq_len)
            out, lse, kept = torch.ops.ringattn.ring_forward(query, key, value, *where, *options)
            call = number.clone()
        else:
            call = None
            out, lse, kept = torch.ops.ringattn.virtual_ring_forward(
                query, key, value, place.world_size, place.layout, *options
            )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, out, lse, kept, call, options.cu_seqlens)
        ctx.place = place
        ctx.device = query.device
        ctx.options = options._replace(cu_seqlens=None)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        place: _Place = ctx.place

        def gradients() -> tuple[Tensor, ...]:
            # Raises if a saved tensor was changed or freed; in here, so that the other ranks hear of it.
            query, key, value, out, lse, kept, call, cu_seqlens = ctx.saved_tensors
            options = ctx.options._replace(cu_seqlens=cu_seqlens)
            whole_grad = torch.zeros_like(out) if grad_out is None else grad_out
            tensors = (whole_grad, grad_lse, query, key, value, out, lse, kept)
            if place.world_size is None:
                operator = torch.ops.ringattn.ring_backward
                where: tuple = (call, order(), place.group, place.layout, place.seq_len, place.key_seq_len)
            else:
                operator = torch.ops.ringattn.virtual_ring_backward
                where = (place.world_size, place.layout)
            if torch.compiler.is_compiling():
                return operator(*tensors, *where, *options)  # compiled code refuses a second derivative by itself
            inputs = (tensor for tensor in (whole_grad, grad_lse, query, key, value) if tensor is not None)
            return _Once.apply(lambda: operator(*tensors, *where, *options), *inputs)

        wanted = zip(ring_call(place.group, gradients, ctx.device), ctx.options.needs_grad, strict=True)
        return *[gradient if needed else None for gradient, needed in wanted], None, None


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
    values travel round the ring of ranks. Every rank of the group must make the call, with the same options, and its
    backward pass if any rank does.

    Memory per rank beside inputs and results, whatever the number of ranks: forward two blocks of keys and values and,
    in the accumulation type, one output; one of the blocks is kept for backward. Backward two more blocks, three times
    the gradient of a block and the gradient of the queries in the accumulation type; on the CPU also up to 64 MiB while
    it computes. Of this, all tensors but the kept block are shared by the calls on a group and stay with it: see
    `release_workspace`.

    On a GPU the kernels run on the current stream; the blocks travel on the stream of the group's NCCL communicator,
    under them. The host only enqueues: it waits for no kernel and no message. It waits for the other hosts in the
    calls that are compared (see below), and for the GPU where `cu_seqlens` is there.

    Args:
        query: [B, Hq, S_local, D]. On the CPU float64, float32, bfloat16 or float16 and 1 <= D <= 256; on a GPU (sm_80
            or newer) bfloat16 or float16 and D a multiple of 8 up to 256. Any strides; if the last one is not 1, a copy
            is made.
        key, value: [B, Hkv, S_local, D] of the same dtype and device; Hq must be a multiple of Hkv.
        group: None (the world group, or a ring of one if torch.distributed is not initialised), a ProcessGroup, a
            group name, or a one-dimensional DeviceMesh. The order of the ring is the rank in the group.
        layout: "contiguous", "zigzag" or "striped": which tokens this rank holds; see `positions`.
        seq_len: the number of tokens of the whole sequence. May be left out when all ranks hold the same number.
        key_seq_len: the same for the keys, for cross attention; left out, as many as queries if the local numbers
            agree. Unequal lengths allow the full mask only.
        is_causal: the query at global position p attends to keys at positions <= p.
        window: (left, right) in tokens: only keys from p - left to p + right; -1: unbounded. With is_causal, any
            right is taken as 0.
        cu_seqlens: [documents + 1], int32 or int64: boundaries of packed documents over the whole sequence, from 0 to
            seq_len, the same on every rank. A query attends to its own document alone. Empty documents are allowed.
            Best on the CPU, also for tensors on a GPU: the schedule of the ring depends on it.
        scale: the factor on q.k before the softmax, finite and > 0. Default: D ** -0.5.
        enable_gqa: must be True for Hq != Hkv: query head h then uses key/value head h // (Hq // Hkv).
        deterministic: False allows a faster sum of the queries' gradients whose bits may change from run to run, on
            devices that have one. The CPU has none: results there are always bitwise reproducible for a given ring.
        return_lse: also return the log of the softmax denominator.

    Returns:
        out [B, Hq, S_local, D] in the dtype of the inputs. With return_lse: (out, lse), lse [B, Hq, S_local] in natural
        logarithm, float64 for float64 inputs and float32 otherwise. A query that may see no key gives 0 and -inf.
        Both are differentiable, once.

    Raises:
        ValueError, TypeError: this rank's arguments are bad. The other ranks raise RingError.
        NotImplementedError: this build or this machine has no kernels for the device; the text says why.
        RingError: ranks disagree about the call, another rank refused its input, or communication failed; its
            attributes say whose fault it is. After a disagreement or a refusal the group stays usable; after any other
            failure it is broken, and every later call on it raises at once with what broke it. A rank that fails while
            it is tracing for the compiler is not heard by the others, which wait for the group's timeout.

    A group with a backend for GPUs compares its calls at number 1, 2, 4, 8, … alone, so that the hosts of its ranks
    need not keep pace; a disagreement or a refusal between these leaves the other ranks to the group's timeout. The
    environment variable RINGATTN_CHECK=always has every call compared, off none once the ranks have agreed on one.

    CUDA graphs: forward and backward can be captured, on a group after `init` and one call with the same arguments. All
    ranks capture, and replay in the same order.

    Compile after torch.distributed is initialised: groups, ranks and sizes are constants of the compiled code. It keeps
    calls of this package in program order. The compiler may move another collective past them where neither depends on
    the other: ranks whose programs differ around such a one may then wait for each other.

    Source: Liu, Zaharia, Abbeel: Ring Attention with Blockwise Transformers for Near-Infinite Context
    (arXiv:2310.01889); online softmax: Milakov, Gimelshein (arXiv:1805.02867).
    """
    name = group_name(group)

    def attend() -> tuple[Tensor, Tensor]:
        tensors = _tensors(query, key, value)
        options = _options(tensors, is_causal, window, cu_seqlens, scale, enable_gqa, deterministic)
        place = _Place(
            name,
            text("layout", layout),
            optional_integer("seq_len", seq_len),
            optional_integer("key_seq_len", key_seq_len),
        )
        return _RingAttention.apply(*tensors, place, options)

    out, lse = ring_call(name, attend, query)
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
    over a transport that copies memory. The threads share torch.get_num_threads(). On a GPU every virtual rank has a
    stream for its kernels and one for its copies, which the environment variable RINGATTN_LOOPBACK_GBPS slows down to
    the speed of a link in GB/s. For debugging, and to see what a ring of up to 1024 ranks computes on a machine that
    has not so many.

    Arguments as for `ring_attention`, with S instead of S_local. Raises ValueError and TypeError for bad arguments.
    """

    def attend() -> tuple[Tensor, Tensor]:
        tensors = _tensors(query, key, value)
        options = _options(tensors, is_causal, window, cu_seqlens, scale, enable_gqa, deterministic)
        place = _Place("", text("layout", layout), world_size=integer("world_size", world_size))
        return _RingAttention.apply(*tensors, place, options)

    out, lse = ring_call("", attend)
    return (out, lse) if return_lse else out


def _tensors(query: object, key: object, value: object) -> list[Tensor]:
    """The inputs as scaled_dot_product_attention would take them: under autocast, floating-point ones except float64
    have the autocast dtype."""
    tensors = [tensor("query", query), tensor("key", key), tensor("value", value)]
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors]


def _options(
    tensors: list[Tensor],
    is_causal: object,
    window: object,
    cu_seqlens: object,
    scale: object,
    enable_gqa: object,
    deterministic: object,
) -> _Options:
    """The options in the types of the operators' schemas. Their values are checked in C++."""
    grad = torch.is_grad_enabled()
    return _Options(
        flag("is_causal", is_causal),
        _window(window),
        None if cu_seqlens is None else tensor("cu_seqlens", cu_seqlens),
        None if scale is None else real("scale", scale),
        flag("enable_gqa", enable_gqa),
        flag("deterministic", deterministic),
        [grad and t.requires_grad for t in tensors],
    )


def _window(window: object) -> list[int] | None:
    if window is None:
        return None
    if not isinstance(window, Sequence) or isinstance(window, str):
        raise TypeError(f"window: expected (left, right) or None, got {type_name(window)}")
    return [integer("window", side) for side in window]
