"""Bad input, through every door: each row names what is wrong and what the message must say.

A row spoils one argument of a call that is right. In one process every door must raise. On a ring one rank is bad: it
raises its own error, every other rank a RingError that gives the reason, and the group then makes a correct call.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bad_calls import BY_ID, ROWS, TOO_LARGE, Call, Errors, Row
from ranks import run_ranks
from small_call import INPUTS, attempt, buffers, prove, small_call

import ringattn_ext as ra

pytestmark = pytest.mark.timeout(90)

RANKS_TIMEOUT = 25.0  # for a call in processes; gloo's own timeout is longer


def rows_for(door: str) -> Any:
    return pytest.mark.parametrize(
        "row", [pytest.param(r, id=r.id.replace(" ", "_")) for r in ROWS if door in r.doors.split()]
    )


def spoiled(row: Row, rank: int, world_size: int) -> Call:
    call = small_call(rank, world_size)
    return call | row.spoil(call)


# --- the doors ---


def through_op(call: Call, group: str = "") -> Any:
    call = dict(is_causal=False, window=None, cu_seqlens=None, scale=None, key_seq_len=None) | call
    order = torch.zeros(1, dtype=torch.int64)
    tensors = [call.pop(name) for name in INPUTS]
    return torch.ops.ringattn.ring_forward(
        *tensors, order, group=group, deterministic=True, needs_grad=[False] * 3, **call
    )


def through_virtual(call: Call) -> Any:
    call = {name: value for name, value in call.items() if name not in ("seq_len", "key_seq_len")}
    return ra.virtual_ring_attention(**call, world_size=3)


@rows_for("python")
def test_ring_attention(row: Row) -> None:
    call = spoiled(row, 0, 1)
    before = buffers(call)
    with pytest.raises(row.error) as caught:
        ra.ring_attention(**call)
    assert not isinstance(caught.value, ra.RingError)
    assert re.match(row.message, str(caught.value)), str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, buffers(call), strict=True))


@rows_for("op")
def test_operator(row: Row) -> None:
    with pytest.raises(row.error) as caught:
        through_op(spoiled(row, 0, 1))
    assert re.match(row.message, str(caught.value)), str(caught.value)


@rows_for("virtual")
def test_virtual(row: Row) -> None:
    with pytest.raises(row.error) as caught:
        through_virtual(spoiled(row, 0, 1))
    assert not isinstance(caught.value, ra.RingError)
    assert re.match(row.message, str(caught.value)), str(caught.value)


# Tracing wraps what a fake kernel raises; the text is in it.
COMPILED = [
    "key of another dtype",
    "key on another device",
    "query of 3 dimensions",
    "value of another head_dim",
    "enable_gqa missing",
    "heads no multiple",
    "too few queries",
    "seq_len -1",
    "unknown layout",
    "scale -1.0",
    "scale nan",
    "window left -2",
    "window of 1 entries",
    "cu_seqlens decreasing",
    "cu_seqlens of torch.float32",
]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("id", COMPILED)
def test_compiled(id: str, backend: str) -> None:
    row = BY_ID[id]
    assert "compile" in row.doors
    torch._dynamo.reset()
    compiled = torch.compile(lambda **call: ra.ring_attention(**call), backend=backend, fullgraph=True)
    with pytest.raises((ValueError, TypeError, torch._dynamo.exc.TorchDynamoException)) as caught:
        compiled(**spoiled(row, 0, 1))
    assert re.search(row.message, str(caught.value)), str(caught.value)


# --- one bad rank on a ring ---


def one_bad_rank(id: str, bad: int) -> tuple[str, str]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    call = small_call(rank, world_size)
    if rank == bad:
        call |= BY_ID[id].spoil(call)
    before = buffers(call)
    answer = attempt(ra.ring_attention, **call)
    assert all(torch.equal(a, b) for a, b in zip(before, buffers(call), strict=True)), "an input was written"
    prove()
    return answer


def check_refusal(answers: list[tuple[str, str]], bad: int, row: Row) -> None:
    name, text = answers[bad]
    assert name in [e.__name__ for e in (row.error if isinstance(row.error, tuple) else (row.error,))], answers
    assert re.match(row.message, text), text
    others = [answer for rank, answer in enumerate(answers) if rank != bad]
    expected = f"ring: rank {bad} refused: {text}"
    for other, got in others:
        assert other == "RingError", answers
        # The reason travels in a header of fixed size.
        assert got == expected or len(got.encode()) > 200 and expected.startswith(got), (got, expected)
    assert len(set(others)) == 1


@pytest.mark.parametrize("world_size", [2, 3])
@rows_for("python")
def test_one_bad_rank(row: Row, world_size: int) -> None:
    bad = ROWS.index(row) % world_size
    check_refusal(run_ranks(world_size, one_bad_rank, row.id, bad, timeout=RANKS_TIMEOUT), bad, row)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("id", ["scale nan", "window left -2", "too few queries"])
def test_every_rank_can_be_the_bad_one(id: str, world_size: int) -> None:
    for bad in range(world_size):
        check_refusal(run_ranks(world_size, one_bad_rank, id, bad, timeout=RANKS_TIMEOUT), bad, BY_ID[id])


def bad_operator(id: str, bad: int) -> tuple[str, str]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    call = small_call(rank, world_size)
    if rank == bad:
        call |= BY_ID[id].spoil(call)
    answer = attempt(through_op, call, dist.group.WORLD.group_name)
    prove()
    return answer


@pytest.mark.parametrize(
    "id", ["key of another dtype", "enable_gqa missing", "seq_len -1", "unknown layout", "cu_seqlens too short"]
)
def test_bad_rank_through_operator(id: str) -> None:
    """Direct callers of the operator get the same error."""
    row = BY_ID[id]
    answers = run_ranks(2, bad_operator, id, 1, timeout=RANKS_TIMEOUT)
    assert answers[1][0] == row.error.__name__ and re.match(row.message, answers[1][1])
    assert answers[0] == ("RingError", f"ring: rank 1 refused: {answers[1][1]}")


def bad_compiled(id: str, bad: int) -> tuple[str, str]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(range(world_size), timeout=timedelta(seconds=8))
    torch._dynamo.reset()
    compiled = torch.compile(lambda **call: ra.ring_attention(**call), backend="aot_eager", fullgraph=True)
    call = small_call(rank, world_size, group=group)
    if rank == bad:
        call |= BY_ID[id].spoil(call)
    answer = attempt(compiled, **call)
    prove(group)
    dist.destroy_process_group(group)
    return answer


@pytest.mark.parametrize("id", ["scale -1.0", "key of another dtype", "query of 3 dimensions", "too few queries"])
def test_bad_rank_compiled(id: str) -> None:
    """Tracing must let bad input through to the kernel: a rank that stops before it sends no header."""
    (name, text), other = run_ranks(2, bad_compiled, id, 0, timeout=60)
    assert name in ("ValueError", "TypeError") and re.match(BY_ID[id].message, text), text
    assert other == ("RingError", f"ring: rank 0 refused: {text}")


def two_bad_ranks() -> tuple[str, str]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    changes = [{"scale": 0.0}, {"window": (1,)}, {}][rank]
    answer = attempt(ra.ring_attention, **small_call(rank, world_size, **changes))
    prove()
    return answer


def test_two_bad_ranks() -> None:
    answers = run_ranks(3, two_bad_ranks, timeout=RANKS_TIMEOUT)
    assert [name for name, _ in answers] == ["ValueError", "ValueError", "RingError"]
    assert answers[2][1] == f"ring: rank 0 refused: {answers[0][1]}"


def lone_error_in_backward(bad: int) -> tuple[str, str]:
    """The gradient of one rank has another shape, as a custom autograd function could hand it over."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    call = small_call(rank, world_size)
    order = torch.zeros(1, dtype=torch.int64)
    tensors = [call[name] for name in INPUTS]
    where = dict(
        group=dist.group.WORLD.group_name,
        layout="zigzag",
        seq_len=call["seq_len"],
        key_seq_len=None,
        is_causal=False,
        window=None,
        cu_seqlens=None,
        scale=None,
        enable_gqa=True,
        deterministic=True,
        needs_grad=[True] * 3,
    )
    out, lse, kept = torch.ops.ringattn.ring_forward(*tensors, order, **where)
    call = order.clone()
    grad = out[:, :, 1:] if rank == bad else out
    answer = attempt(torch.ops.ringattn.ring_backward, grad, None, *tensors, out, lse, kept, call, order, **where)
    prove()
    return answer


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_bad_rank_in_backward(world_size: int) -> None:
    answers = run_ranks(world_size, lone_error_in_backward, 1, timeout=RANKS_TIMEOUT)
    assert answers[1] == ("ValueError", "grad_out: expected shape [2, 4, 6, 8], got [2, 4, 5, 8]")
    for rank, answer in enumerate(answers):
        assert rank == 1 or answer == ("RingError", f"ring: rank 1 refused: {answers[1][1]}")


# --- what the operators alone can be told ---

BACKWARD = [
    ("grad_out", lambda x: x[:, :, 1:], ValueError, r"grad_out: expected shape \[2, 4, 6, 8\], got \[2, 4, 5, 8\]"),
    ("grad_out", lambda x: x[0], ValueError, r"grad_out: expected shape \[2, 4, 6, 8\], got \[4, 6, 8\]"),
    ("grad_out", torch.Tensor.double, TypeError, "grad_out: expected dtype float32, got float64"),
    ("grad_out", lambda x: x.to("meta"), (TypeError, ValueError), "grad_out: expected .*meta"),
    ("grad_lse", lambda x: x[..., None], ValueError, r"grad_lse: expected shape \[2, 4, 6\], got \[2, 4, 6, 1\]"),
    ("grad_lse", torch.Tensor.bfloat16, TypeError, "grad_lse: expected dtype float32, got bfloat16"),
    ("out", lambda x: x[:, :2], ValueError, r"out: expected shape \[2, 4, 6, 8\], got \[2, 2, 6, 8\]"),
    ("out", torch.Tensor.half, TypeError, "out: expected dtype float32, got float16"),
    ("lse", lambda x: x[:1], ValueError, r"lse: expected shape \[2, 4, 6\], got \[1, 4, 6\]"),
    ("lse", torch.Tensor.double, TypeError, "lse: expected dtype float32, got float64"),
    ("kept", lambda x: torch.cat((x.flatten(), torch.zeros(1))), ValueError, r"kept: expected shape \[.*\], got \["),
    ("kept", torch.Tensor.double, TypeError, "kept: expected dtype float32, got float64"),
    ("key", torch.Tensor.double, TypeError, "key: expected the dtype of query, float32, got float64"),
    ("needs_grad", lambda x: x[:2], ValueError, r"needs_grad: expected 3 flags \(query, key, value\), got 2"),
    ("layout", lambda x: "spiral", ValueError, "layout: expected 'contiguous', 'zigzag' or 'striped', got 'spiral'"),
    ("scale", lambda x: -1.0, ValueError, "scale: expected a finite number above 0, got -1"),
]


@pytest.mark.parametrize("world_size", [0, 1, 3], ids=["ring", "virtual1", "virtual3"])
@pytest.mark.parametrize(
    "name, spoil, error, message", BACKWARD, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(BACKWARD)]
)
def test_backward_operator(name: str, spoil: Callable, error: Errors, message: str, world_size: int) -> None:
    call = small_call(0, 1)
    tensors = {x: call[x] for x in INPUTS}
    options = dict(
        layout="zigzag",
        is_causal=True,
        window=None,
        cu_seqlens=None,
        scale=None,
        enable_gqa=True,
        deterministic=True,
        needs_grad=[True] * 3,
    )
    ops = torch.ops.ringattn
    if world_size == 0:
        options |= dict(order=torch.zeros(1, dtype=torch.int64), group="", seq_len=None, key_seq_len=None)
        forward, backward = ops.ring_forward, ops.ring_backward
    else:
        options |= dict(world_size=world_size)
        forward, backward = ops.virtual_ring_forward, ops.virtual_ring_backward
    out, lse, kept = forward(**tensors, **options)
    call = tensors | options | dict(out=out, lse=lse, kept=kept, grad_out=out.clone(), grad_lse=lse.clone())
    if world_size == 0:
        call["forward_call"] = options["order"].clone()
    backward(**call)
    with pytest.raises(error) as caught:
        backward(**call | {name: spoil(call[name])})
    assert re.match(message, str(caught.value)), str(caught.value)


META = torch.empty(2, 4, 6, 8, device="meta")
ROWS_OF_META = torch.empty(2, 4, 6, device="meta")


def one_block(**changes: torch.Tensor) -> Any:
    call = dict(zip("oml", (torch.zeros(2, 4, 6, 8), torch.zeros(2, 4, 6), torch.zeros(2, 4, 6)), strict=True))
    call |= {name: torch.ones(2, 4, 6, 8) for name in INPUTS} | {"cu_seqlens": None} | changes
    options = dict(query_segments=[0, 1, 6], key_segments=[0, 1, 6], key_seq_len=6, is_causal=False, window=None)
    return torch.ops.ringattn.block_forward_(**call, **options, scale=None, finalize=True)


def state(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    shapes = dict(o=(2, 4, 6, 8), m=(2, 4, 6), l=(2, 4, 6))
    return {name: torch.zeros(shape) for name, shape in shapes.items()} | changes


MIXED: dict[str, Callable[[], Any]] = {
    "block_forward_ query": lambda: one_block(query=META),
    "block_forward_ key": lambda: one_block(key=META),
    "block_forward_ o": lambda: one_block(o=META),
    "block_forward_ m": lambda: one_block(m=ROWS_OF_META),
    "block_forward_ cu_seqlens": lambda: one_block(cu_seqlens=torch.tensor([0, 6], device="meta")),
    "delta grad_out": lambda: torch.ops.ringattn.delta(torch.ones(2, 4, 6, 8), META, None),
    "delta grad_lse": lambda: torch.ops.ringattn.delta(torch.ones(2, 4, 6, 8), torch.ones(2, 4, 6, 8), ROWS_OF_META),
    "merge_ other_o": lambda: torch.ops.ringattn.merge_(
        **state(), **{f"other_{name}": value for name, value in state(o=META).items()}, scale=1.0
    ),
    "merge_ l": lambda: torch.ops.ringattn.merge_(
        **state(l=ROWS_OF_META), **{f"other_{name}": value for name, value in state().items()}, scale=1.0
    ),
    "finalize m": lambda: torch.ops.ringattn.finalize(**state(m=ROWS_OF_META), scale=1.0, dtype=torch.float32),
}


@pytest.mark.parametrize("call", MIXED.values(), ids=[name.replace(" ", "-") for name in MIXED])
def test_building_blocks_on_two_devices(call: Callable[[], Any]) -> None:
    """With one tensor on the meta device the dispatcher picks the fake kernel, whose results are uninitialised."""
    with pytest.raises((ValueError, TypeError), match=r"^\w+: expected .*meta"):
        call()


@pytest.mark.parametrize(
    "value, error, message",
    [
        (0, ValueError, "world_size: expected a number from 1 to 1024, got 0"),
        (-3, ValueError, "world_size: expected a number from 1 to 1024, got -3"),
        (1025, ValueError, "world_size: expected a number from 1 to 1024, got 1025"),
        (TOO_LARGE, ValueError, "world_size: expected a number"),
        (2.0, TypeError, "world_size: expected an int, got float"),
        (None, TypeError, "world_size: expected an int, got None"),
        (True, TypeError, "world_size: expected an int, got bool"),
    ],
)
def test_virtual_world_size(value: Any, error: type[Exception], message: str) -> None:
    call = small_call(0, 1)
    with pytest.raises(error, match=re.escape(message)):
        ra.virtual_ring_attention(**{x: call[x] for x in INPUTS}, enable_gqa=True, world_size=value)


# --- sharding and positions ---

X = torch.zeros(2, 6, 3)
SHARDING = [
    (lambda: ra.shard(X, 3), ValueError, "dim: expected a number from -3 to 2, got 3"),
    (lambda: ra.shard(X, -4), ValueError, "dim: expected a number from -3 to 2, got -4"),
    (lambda: ra.shard(X, 1.0), TypeError, "dim: expected an int, got float"),
    (lambda: ra.shard(torch.tensor(1.0), 0), ValueError, "x: expected at least one dimension, got a scalar"),
    (lambda: ra.shard([1.0], 0), TypeError, "x: expected a Tensor, got list"),
    (
        lambda: ra.shard(X, 1, layout="spiral"),
        ValueError,
        "layout: expected 'contiguous', 'zigzag' or 'striped', got 'spiral'",
    ),
    (lambda: ra.shard(X, 1, layout=1), TypeError, "layout: expected a str, got int"),
    (lambda: ra.shard(X, 1, group="nobody"), ValueError, "group: expected .*, got 'nobody'"),
    (lambda: ra.shard(X, 1, group=3), TypeError, "group: expected .*, got int"),
    (lambda: ra.unshard(X, 3), ValueError, "dim: expected a number from -3 to 2, got 3"),
    (lambda: ra.unshard(X, None), TypeError, "dim: expected an int, got None"),
    (lambda: ra.unshard(torch.tensor(1.0), 0), ValueError, "x: expected at least one dimension, got a scalar"),
    (lambda: ra.unshard([1.0], 0), TypeError, "x: expected a Tensor, got list"),
    (
        lambda: ra.unshard(X, 1, layout="spiral"),
        ValueError,
        "layout: expected 'contiguous', 'zigzag' or 'striped', got 'spiral'",
    ),
    (lambda: ra.unshard(X, 1, layout=1), TypeError, "layout: expected a str, got int"),
    (lambda: ra.unshard(X, 1, seq_len=7), ValueError, "x: expected 7 tokens along dim 1 on rank 0 of 1 .*, got 6"),
    (lambda: ra.unshard(X, 1, seq_len=-1), ValueError, r"seq_len: expected a number from 0 to 2\^31 - 1, got -1"),
    (lambda: ra.unshard(X, 1, seq_len=TOO_LARGE), ValueError, f"seq_len: expected a number .*, got {TOO_LARGE}"),
    (lambda: ra.unshard(X, 1, seq_len=6.0), TypeError, "seq_len: expected an int.*, got float"),
    (lambda: ra.unshard(X, 1, group="nobody"), ValueError, "group: expected .*, got 'nobody'"),
    (
        lambda: ra.positions(6, layout="spiral"),
        ValueError,
        "layout: expected 'contiguous', 'zigzag' or 'striped', got 'spiral'",
    ),
    (lambda: ra.positions(-1), ValueError, r"seq_len: expected a number from 0 to 2\^31 - 1, got -1"),
    (lambda: ra.positions(6.0), TypeError, "seq_len: expected an int, got float"),
    (lambda: ra.positions(6, group="nobody"), ValueError, "group: expected .*, got 'nobody'"),
    (lambda: ra.positions(6, rank=1), ValueError, "rank, world_size: expected both or neither"),
    (lambda: ra.positions(6, rank=2, world_size=2), ValueError, "rank: expected a number from 0 to 1, got 2"),
    (lambda: ra.positions(6, rank=-1, world_size=2), ValueError, "rank: expected a number from 0 to 1, got -1"),
    (lambda: ra.positions(6, rank=0, world_size=0), ValueError, "world_size: expected a number from 1 to "),
    (
        lambda: ra.positions(6, rank=0, world_size=1, group="x"),
        ValueError,
        "group: expected None where rank and world_size are given",
    ),
]


@pytest.mark.parametrize("call, error, message", SHARDING, ids=[f"{i}" for i in range(len(SHARDING))])
def test_sharding(call: Callable, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert re.match(message, str(caught.value)), str(caught.value)


UNSHARD_CHANGES = {
    "dim": {"dim": 5},
    "layout": {"layout": "spiral"},
    "type of layout": {"layout": 1},
    "seq_len": {"seq_len": 50},
    "large seq_len": {"seq_len": TOO_LARGE},
    "x": {"x": None},
}


def bad_unshard(id: str, bad: int) -> tuple[str, str]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    call = dict(x=torch.ones(2, 3), dim=1) | (UNSHARD_CHANGES[id] if rank == bad else {})
    answer = attempt(ra.unshard, **call)
    assert torch.equal(ra.unshard(torch.full((1,), float(rank)), 0, layout="striped"), torch.arange(float(world_size)))
    return answer


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("id", UNSHARD_CHANGES)
def test_bad_unshard(id: str, world_size: int) -> None:
    answers = run_ranks(world_size, bad_unshard, id, 0, timeout=RANKS_TIMEOUT)
    assert answers[0][0] in ("ValueError", "TypeError") and re.match(r"\w+: expected .*got ", answers[0][1]), answers
    assert set(answers[1:]) == {("RingError", f"ring: rank 0 refused: {answers[0][1]}")}
