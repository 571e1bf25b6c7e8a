"""torch.library.opcheck: schemas say what is written and aliased, fake kernels give the shapes of the real ones."""

import pytest
import torch
from ranks import run_ranks

import ringattn_ext  # noqa: F401  registers the operators

OPS = torch.ops.ringattn
ORDER = torch.zeros(1, dtype=torch.int64)
NO_GRAD = [False, False, False]


def opcheck(op, args) -> None:
    torch.library.opcheck(op, args, raise_exception=True)


def _inputs(S: int, dtype: torch.dtype = torch.float32, heads_inside: bool = False) -> list[torch.Tensor]:
    if heads_inside:
        return [torch.randn(2, S, H, 8, dtype=dtype).transpose(1, 2) for H in (4, 2, 2)]
    return [torch.randn(2, H, S, 8, dtype=dtype) for H in (4, 2, 2)]


def _options(cu_seqlens=None, window=None, scale=None, needs_grad=NO_GRAD) -> tuple:
    """is_causal, window, cu_seqlens, scale, enable_gqa, deterministic, needs_grad"""
    return (True, window, cu_seqlens, scale, True, True, needs_grad)


def _check_ring(layout: str, dtype: torch.dtype, seq_len: int | None, group: str, S: int, heads_inside: bool) -> None:
    inputs = _inputs(S, dtype, heads_inside)
    where = (ORDER, group, layout, seq_len, None)
    for options in (_options(), _options(window=[3, 0], scale=0.3), _options(needs_grad=[False, True, False])):
        opcheck(OPS.ring_forward.default, (*inputs, *where, *options))
    out, lse, kept = OPS.ring_forward(*inputs, *where, *_options(needs_grad=[True] * 3))
    call = ORDER.clone()
    for needs_grad, grad_lse in (([True] * 3, torch.randn_like(lse)), ([True, False, True], None)):
        saved = (torch.randn_like(out), grad_lse, *inputs, out, lse, kept, call)
        opcheck(OPS.ring_backward.default, (*saved, *where, *_options(needs_grad=needs_grad)))
    opcheck(OPS.gather.default, (inputs[0], ORDER, 2, group, layout, seq_len))
    opcheck(OPS.shard.default, (inputs[0], 2, group, layout))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("heads_inside", [False, True])
def test_ring_of_one(dtype, heads_inside):
    _check_ring("zigzag", dtype, None, "", 9, heads_inside)


def _two_ranks(layout: str) -> None:
    import torch.distributed as dist

    torch.manual_seed(0)
    name = dist.group.WORLD.group_name
    _check_ring(layout, torch.float32, None, name, 5, False)
    odd = ringattn_ext.positions(9, layout=layout)
    _check_ring(layout, torch.float32, 9, name, len(odd), True)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_two_ranks(layout):
    run_ranks(2, _two_ranks, layout, timeout=200)


@pytest.mark.parametrize("P", [1, 3])
def test_virtual_ring(P):
    inputs = _inputs(11)
    bounds = torch.tensor([0, 4, 4, 11])
    opcheck(OPS.virtual_ring_forward.default, (*inputs, P, "zigzag", *_options(bounds)))
    out, lse, kept = OPS.virtual_ring_forward(*inputs, P, "zigzag", *_options(bounds, needs_grad=[True] * 3))
    saved = (torch.randn_like(out), torch.randn_like(lse), *inputs, out, lse, kept)
    opcheck(OPS.virtual_ring_backward.default, (*saved, P, "zigzag", *_options(bounds, needs_grad=[True] * 3)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_blocks(dtype):
    query, key, value = _inputs(7, dtype)
    state_type = torch.float64 if dtype == torch.float64 else torch.float32
    o = torch.zeros(query.shape, dtype=state_type)
    m = torch.full(query.shape[:3], -torch.inf, dtype=state_type)
    l = torch.zeros(query.shape[:3], dtype=state_type)  # noqa: E741
    block = ([0, 1, 4, 10, 1, 3], [0, 2, 7], 14, True, [5, 0], None, 0.5)
    for finalize in (False, True):
        opcheck(OPS.block_forward_.default, (o, m, l, query, key, value, *block, finalize))
    out, lse = OPS.block_forward_(o, m, l, query, key, value, *block, True)

    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    opcheck(OPS.delta.default, (out, grad_out, grad_lse))
    opcheck(OPS.delta.default, (out, grad_out, None))
    delta = OPS.delta(out, grad_out, grad_lse)
    accumulators = [torch.zeros(t.shape, dtype=state_type) for t in (query, key, value)]
    saved = (grad_out, query, key, value, lse, delta)
    opcheck(OPS.block_backward_.default, (*accumulators, *saved, *block, True))
    opcheck(OPS.block_backward_.default, (None, accumulators[1], None, *saved, *block, True))

    other = [torch.randn_like(t).abs() for t in (o, m, l)]
    opcheck(OPS.merge_.default, (o, m, l, *other, 0.5))
    opcheck(OPS.finalize.default, (o, m, l, 0.5, dtype))


def test_init():
    opcheck(OPS.init.default, (ORDER, "", torch.device("cpu")))


def test_refuse():
    opcheck(OPS.refuse.default, (ORDER, "", "no reason", torch.device("cpu")))


def test_raw_operators_are_not_differentiable():
    inputs = [tensor.requires_grad_() for tensor in _inputs(5)]
    out, _, _ = OPS.ring_forward(*inputs, ORDER, "", "zigzag", None, None, *_options())
    with pytest.raises(RuntimeError, match="not implemented"):
        out.sum().backward()
