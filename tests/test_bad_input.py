"""Bad input, through every door: each row names what is wrong and what the message must say.

A row spoils one argument of a call that is right. In one process every door must raise. On a ring one rank is bad: it
raises its own error, every other rank a RingError that gives the reason, and the group then makes a correct call.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from small_call import HKV, HQ, INPUTS, TOKENS, assert_near, attempt, buffers, inputs, padded, prove, small_call

import ringattn_ext as ra

pytestmark = pytest.mark.timeout(90)

RANKS_TIMEOUT = 25.0  # for a call in processes; gloo's own timeout is longer

Call = dict[str, Any]
Errors = type[Exception] | tuple[type[Exception], ...]


class Row(NamedTuple):
    id: str
    spoil: Callable[[Call], Call]  # the arguments that change
    error: Errors
    message: str  # a regular expression, from the start
    doors: str = "python op virtual compile"


def _set(**changes: Any) -> Callable[[Call], Call]:
    return lambda call: changes


def _each(*names: str, to: Callable[[torch.Tensor], Any]) -> Callable[[Call], Call]:
    return lambda call: {name: to(call[name]) for name in names}


def _documents(*bounds: int, dtype: torch.dtype = torch.int64) -> Callable[[Call], Call]:
    """Bounds of which -1 stands for seq_len."""
    return lambda call: {"cu_seqlens": torch.tensor([call["seq_len"] if b == -1 else b for b in bounds], dtype=dtype)}


def _unequal(**mask: Any) -> Callable[[Call], Call]:
    """Twice as many keys as queries."""

    def spoil(call: Call) -> Call:
        key = torch.cat((call["key"], call["key"]), 2)
        documents = {"cu_seqlens": torch.tensor([0, 2 * call["seq_len"]])} if mask.get("cu_seqlens") else {}
        return {"key": key, "value": key, "key_seq_len": 2 * call["seq_len"]} | mask | documents

    return spoil


def _fewer_heads(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.new_ones(*x.shape[:3], 257)


_NO_COMPILE = "python op virtual"  # dynamo does not trace such tensors
_PYTHON = "python virtual"  # torch.ops has its own message for a wrong type
_RING = "python op compile"  # virtual ranks have no such argument
_TOO_LARGE = 2**70
_DTYPES = "dtype float64, float32, bfloat16 or float16, got "
_CROSS = r"is_causal, window, cu_seqlens: expected none of them for .* unequal lengths, seq_len \d+ and key_seq_len \d+"

ROWS = [
    # dtypes
    *[Row(f"{x} of another dtype", _each(x, to=torch.Tensor.double), TypeError, f"{x}: expected the dtype of query, Float, got Double")
      for x in ("key", "value")],
    Row("query of another dtype", _each("query", to=torch.Tensor.bfloat16), TypeError, "key: expected the dtype of query, BFloat16, got Float"),
    *[Row(f"{dtype} inputs", _each(*INPUTS, to=lambda x, dtype=dtype: torch.zeros(x.shape, dtype=dtype)), TypeError,
          f"query: expected {_DTYPES}{name}", _NO_COMPILE)
      for dtype, name in ((torch.int32, "Int"), (torch.bool, "Bool"), (torch.complex64, "ComplexFloat"), (torch.float8_e4m3fn, "Float8_e4m3fn"))],
    # devices and kinds of tensors
    *[Row(f"{x} on another device", _each(x, to=lambda x: x.to("meta")), ValueError, f"{x}: expected the device of query, cpu, got meta")
      for x in ("key", "value")],
    Row("query on another device", _each("query", to=lambda x: x.to("meta")), ValueError, "key: expected the device of query, meta, got cpu"),
    Row("sparse query", _each("query", to=torch.Tensor.to_sparse), (TypeError, ValueError), "query: expected .*[Ss]parse", "python virtual"),
    *[Row(f"{x} is {name}", _each(x, to=lambda x, value=value: value), TypeError, rf"{x}: expected a Tensor, got (numpy\.)?{name}", _PYTHON)
      for x in INPUTS for value, name in ((None, "NoneType"), ([1.0], "list"), (np.zeros(3), "ndarray"))],
    # shapes
    *[Row(f"{x} of 3 dimensions", _each(x, to=lambda x: x[0]), ValueError, rf"{x}: expected 4 dimensions \[B, H, S, D\], got 3")
      for x in INPUTS],
    Row("key of 5 dimensions", _each("key", to=lambda x: x[None]), ValueError, r"key: expected 4 dimensions \[B, H, S, D\], got 5"),
    *[Row(f"{x} of another batch size", _each(x, to=lambda x: x[:1]), ValueError, f"{x}: expected the batch size of query, 2, got 1")
      for x in ("key", "value")],
    *[Row(f"{x} of another head_dim", _each(x, to=lambda x: x[..., :4]), ValueError, f"{x}: expected the head_dim of query, 8, got 4")
      for x in ("key", "value")],
    Row("value of other heads than key", _each("value", to=_fewer_heads), ValueError, "value: expected as many heads as key, 2, got 1"),
    Row("value of other length than key", _each("value", to=lambda x: x[:, :, :-1]), ValueError, "value: expected as many tokens as key, "),
    Row("heads no multiple", _each("query", to=lambda x: x[:, :3]), ValueError,
        "query: expected a number of heads that is a multiple of the 2 heads of key and value, got 3"),
    Row("enable_gqa missing", _set(enable_gqa=False), ValueError, "enable_gqa: expected True for 4 query heads over 2 key/value heads, got False"),
    Row("head_dim 0", _each(*INPUTS, to=lambda x: x[..., :0]), ValueError, "query: expected a head_dim from 1 to 256, got 0"),
    Row("head_dim 257", _each(*INPUTS, to=_wide), ValueError, "query: expected a head_dim from 1 to 256, got 257"),
    Row("no query heads", _each("query", to=lambda x: x[:, :0]), ValueError, "query: expected at least one head, got 0"),
    Row("no key heads", _each("key", "value", to=lambda x: x[:, :0]), ValueError, "key: expected at least one head, got 0"),
    Row("too few queries", _each("query", to=lambda x: x[:, :, :-1]), ValueError,
        r"query: expected 6 tokens on rank \d of \d \(layout 'zigzag', seq_len \d+\), got 5", _RING),
    Row("too many keys", lambda call: {"key": torch.cat((call["key"],) * 2, 2), "value": torch.cat((call["value"],) * 2, 2),
        "key_seq_len": call["seq_len"]}, ValueError,
        r"key: expected 6 tokens on rank \d of \d \(layout 'zigzag', key_seq_len \d+\), got 12", _RING),
    # lengths
    Row("seq_len not of these tensors", lambda call: {"seq_len": call["seq_len"] + 4}, ValueError, r"query: expected \d+ tokens .*got 6", _RING),
    Row("key_seq_len not of these tensors", lambda call: {"key_seq_len": call["seq_len"] + 4}, ValueError, r"key: expected \d+ tokens .*got 6", _RING),
    *[Row(f"{x} {value}", _set(**{x: value}), ValueError, rf"{x}: expected a number from 0 to 2\^31 - 1, got {value}", _RING)
      for x in ("seq_len", "key_seq_len") for value in (-1, 2**31)],
    *[Row(f"{x} beyond 64 bits", _set(**{x: _TOO_LARGE}), ValueError, f"{x}: expected a number .*, got {_TOO_LARGE}", "python")
      for x in ("seq_len", "key_seq_len")],
    *[Row(f"{x} is a {type(value).__name__}", _set(**{x: value}), TypeError, f"{x}: expected an int, got {type(value).__name__}", "python")
      for x in ("seq_len", "key_seq_len") for value in (6.0, "6", True)],
    # layout
    Row("unknown layout", _set(layout="spiral"), ValueError, "layout: expected 'contiguous', 'zigzag' or 'striped', got 'spiral'"),
    Row("empty layout", _set(layout=""), ValueError, "layout: expected 'contiguous', 'zigzag' or 'striped', got ''"),
    Row("long layout", _set(layout="x" + "é" * 300), ValueError, "layout: expected 'contiguous', 'zigzag' or 'striped', got 'xé+'"),
    Row("layout that is no text", _set(layout="\ud800"), ValueError, "layout: expected .*, got ", _PYTHON),
    Row("layout not a string", _set(layout=1), TypeError, "layout: expected a str, got int", _PYTHON),
    # scale
    *[Row(f"scale {value}", _set(scale=value), ValueError, rf"scale: expected a finite number above 0, got {text}")
      for value, text in ((float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf"), (0.0, "0"), (-0.0, "-?0"), (-1.0, "-1"))],
    Row("scale 0 as an int", _set(scale=0), ValueError, "scale: expected a finite number above 0, got 0", _PYTHON),
    Row("scale beyond a float", _set(scale=10**400), ValueError, "scale: expected a finite number", _PYTHON),
    *[Row(f"scale is a {type(value).__name__}", _set(scale=value), TypeError, rf"scale: expected a float.*, got (torch\.)?{type(value).__name__}", _PYTHON)
      for value in ("1", True, torch.ones(1), 1j)],
    # window
    Row("window left -2", _set(window=(-2, 0)), ValueError, r"window: expected left >= -1 \(-1: unbounded\), got -2"),
    Row("window right -2", _set(window=(0, -2)), ValueError, r"window: expected right >= -1 \(-1: unbounded\), got -2"),
    Row("window right -2 under is_causal", _set(window=(0, -2), is_causal=True), ValueError, "window: expected right >= -1"),
    *[Row(f"window of {len(value)} entries", _set(window=value), ValueError, rf"window: expected \(left, right\), got {len(value)} entries")
      for value in ((), (1,), (1, 2, 3))],
    *[Row(f"window {value!r}", _set(window=value), TypeError, "window: expected (an int|two ints), got ", _PYTHON)
      for value in ((1.0, 2), (None, 0), (True, 0), ("1", "2"))],
    *[Row(f"window is a {type(value).__name__}", _set(window=value), TypeError, rf"window: expected \(left, right\) or None, got (torch\.)?{type(value).__name__}", _PYTHON)
      for value in (3, "12", {1, 2}, torch.tensor([1, 2]))],
    Row("window beyond 64 bits", _set(window=(_TOO_LARGE, 0)), ValueError, f"window: expected .*{_TOO_LARGE}", _PYTHON),
    # documents
    Row("cu_seqlens of 2 dimensions", lambda call: {"cu_seqlens": torch.tensor([[0, call["seq_len"]]])}, ValueError,
        r"cu_seqlens: expected one dimension with at least one entry, got shape \[1, 2\]"),
    Row("cu_seqlens of 0 dimensions", _set(cu_seqlens=torch.tensor(0)), ValueError, r"cu_seqlens: expected one dimension .*got shape \[\]"),
    Row("cu_seqlens empty", _documents(), ValueError, r"cu_seqlens: expected one dimension .*got shape \[0\]"),
    *[Row(f"cu_seqlens of {dtype}", _documents(0, -1, dtype=dtype), TypeError, f"cu_seqlens: expected dtype int32 or int64, got {name}")
      for dtype, name in ((torch.float32, "Float"), (torch.int16, "Short"), (torch.bool, "Bool"))],
    Row("cu_seqlens not from 0", _documents(1, -1), ValueError, "cu_seqlens: expected 0 as the first entry, got 1"),
    Row("cu_seqlens from below 0", _documents(-3, -1), ValueError, "cu_seqlens: expected 0 as the first entry, got -3"),
    Row("cu_seqlens decreasing", _documents(0, 4, 3, -1), ValueError, "cu_seqlens: expected entries that do not decrease, got 3 after 4 at index 2"),
    Row("cu_seqlens too short", _documents(0, 2, 5), ValueError, r"cu_seqlens: expected seq_len, \d+, as the last entry, got 5"),
    Row("cu_seqlens too long", _documents(0, 2**40), ValueError, rf"cu_seqlens: expected seq_len, \d+, as the last entry, got {2**40}"),
    Row("cu_seqlens of one entry", _documents(0), ValueError, r"cu_seqlens: expected seq_len, \d+, as the last entry, got 0"),
    Row("cu_seqlens a list", _set(cu_seqlens=[0, 6]), TypeError, "cu_seqlens: expected a Tensor.*, got list", _PYTHON),
    Row("cu_seqlens on meta", lambda call: {"cu_seqlens": torch.tensor([0, call["seq_len"]]).to("meta")}, (TypeError, ValueError), "cu_seqlens: expected .*meta", _NO_COMPILE),
    Row("cu_seqlens sparse", lambda call: {"cu_seqlens": torch.tensor([0, call["seq_len"]]).to_sparse()}, (TypeError, ValueError), "cu_seqlens: expected .*[Ss]parse", _PYTHON),
    # unequal lengths
    *[Row(f"cross attention with {name}", _unequal(**mask), ValueError, _CROSS, "python op virtual")
      for name, mask in (("is_causal", {"is_causal": True}), ("window", {"window": (3, 3)}), ("documents", {"cu_seqlens": True}))],
    # flags
    *[Row(f"{x} {value!r}", _set(**{x: value}), TypeError, f"{x}: expected a bool, got {type(value).__name__}", _PYTHON)
      for x in ("is_causal", "enable_gqa", "deterministic") for value in (1, None, "yes")],
]  # fmt: skip
BY_ID = {row.id: row for row in ROWS}
assert len(BY_ID) == len(ROWS)


def rows_for(door: str) -> Any:
    return pytest.mark.parametrize("row", [pytest.param(r, id=r.id.replace(" ", "_")) for r in ROWS if door in r.doors.split()])


def spoiled(row: Row, rank: int, world_size: int) -> Call:
    call = small_call(rank, world_size)
    return call | row.spoil(call)


# --- the doors ---


def through_op(call: Call, group: str = "") -> Any:
    call = dict(is_causal=False, window=None, cu_seqlens=None, scale=None, key_seq_len=None) | call
    order = torch.zeros(1, dtype=torch.int64)
    tensors = [call.pop(name) for name in INPUTS]
    return torch.ops.ringattn.ring_forward(*tensors, order, group=group, deterministic=True, needs_grad=[False] * 3, **call)


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
COMPILED = ["key of another dtype", "key on another device", "query of 3 dimensions", "value of another head_dim", "enable_gqa missing",
            "heads no multiple", "too few queries", "seq_len -1", "unknown layout", "scale -1.0", "scale nan", "window left -2",
            "window of 1 entries", "cu_seqlens decreasing", "cu_seqlens of torch.float32"]  # fmt: skip


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


@pytest.mark.parametrize("id", ["key of another dtype", "enable_gqa missing", "seq_len -1", "unknown layout", "cu_seqlens too short"])
def test_bad_rank_through_operator(id: str) -> None:
    """Direct callers of the operator get a RuntimeError with the text of RingError."""
    row = BY_ID[id]
    answers = run_ranks(2, bad_operator, id, 1, timeout=RANKS_TIMEOUT)
    assert answers[1][0] == row.error.__name__ and re.match(row.message, answers[1][1])
    assert answers[0] == ("RuntimeError", f"ring: rank 1 refused: {answers[1][1]}")


def bad_compiled(bad: int) -> tuple[str, str]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch._dynamo.reset()
    compiled = torch.compile(lambda **call: ra.ring_attention(**call), backend="aot_eager", fullgraph=True)
    call = small_call(rank, world_size, scale=-1.0 if rank == bad else 1.0)
    answer = attempt(compiled, **call)
    prove()
    return answer


def test_bad_rank_compiled() -> None:
    answers = run_ranks(2, bad_compiled, 0, timeout=60)
    assert answers[0] == ("ValueError", "scale: expected a finite number above 0, got -1")
    assert answers[1][0] in ("RuntimeError", "RingError"), answers
    assert answers[1][1] == ("ring: rank 0 refused: scale: expected a finite number above 0, got -1")


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
    where = dict(group=dist.group.WORLD.group_name, layout="zigzag", seq_len=call["seq_len"], key_seq_len=None, is_causal=False,
                 window=None, cu_seqlens=None, scale=None, enable_gqa=True, deterministic=True, needs_grad=[True] * 3)  # fmt: skip
    out, lse, kept = torch.ops.ringattn.ring_forward(*tensors, order, **where)
    grad = out[:, :, 1:] if rank == bad else out
    answer = attempt(torch.ops.ringattn.ring_backward, grad, None, *tensors, out, lse, kept, order, **where)
    prove()
    return answer


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_bad_rank_in_backward(world_size: int) -> None:
    answers = run_ranks(world_size, lone_error_in_backward, 1, timeout=RANKS_TIMEOUT)
    assert answers[1] == ("ValueError", "grad_out: expected shape [2, 4, 6, 8], got [2, 4, 5, 8]")
    for rank, answer in enumerate(answers):
        assert rank == 1 or answer == ("RuntimeError", f"ring: rank 1 refused: {answers[1][1]}")


# --- what the operators alone can be told ---

BACKWARD = [
    ("grad_out", lambda x: x[:, :, 1:], ValueError, r"grad_out: expected shape \[2, 4, 6, 8\], got \[2, 4, 5, 8\]"),
    ("grad_out", lambda x: x[0], ValueError, r"grad_out: expected shape \[2, 4, 6, 8\], got \[4, 6, 8\]"),
    ("grad_out", torch.Tensor.double, TypeError, "grad_out: expected dtype Float, got Double"),
    ("grad_out", lambda x: x.to("meta"), (TypeError, ValueError), "grad_out: expected .*meta"),
    ("grad_lse", lambda x: x[..., None], ValueError, r"grad_lse: expected shape \[2, 4, 6\], got \[2, 4, 6, 1\]"),
    ("grad_lse", torch.Tensor.bfloat16, TypeError, "grad_lse: expected dtype Float, got BFloat16"),
    ("out", lambda x: x[:, :2], ValueError, r"out: expected shape \[2, 4, 6, 8\], got \[2, 2, 6, 8\]"),
    ("out", torch.Tensor.half, TypeError, "out: expected dtype Float, got Half"),
    ("lse", lambda x: x[:1], ValueError, r"lse: expected shape \[2, 4, 6\], got \[1, 4, 6\]"),
    ("lse", torch.Tensor.double, TypeError, "lse: expected dtype Float, got Double"),
    ("kept", lambda x: torch.cat((x.flatten(), torch.zeros(1))), ValueError, r"kept: expected shape \[.*\], got \["),
    ("kept", torch.Tensor.double, TypeError, "kept: expected dtype Float, got Double"),
    ("key", torch.Tensor.double, TypeError, "key: expected the dtype of query, Float, got Double"),
    ("needs_grad", lambda x: x[:2], ValueError, r"needs_grad: expected 3 flags \(query, key, value\), got 2"),
    ("layout", lambda x: "spiral", ValueError, "layout: expected 'contiguous', 'zigzag' or 'striped', got 'spiral'"),
    ("scale", lambda x: -1.0, ValueError, "scale: expected a finite number above 0, got -1"),
]  # fmt: skip


@pytest.mark.parametrize("world_size", [0, 1, 3], ids=["ring", "virtual1", "virtual3"])
@pytest.mark.parametrize("name, spoil, error, message", BACKWARD, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(BACKWARD)])
def test_backward_operator(name: str, spoil: Callable, error: Errors, message: str, world_size: int) -> None:
    call = small_call(0, 1)
    tensors = {x: call[x] for x in INPUTS}
    options = dict(layout="zigzag", is_causal=True, window=None, cu_seqlens=None, scale=None, enable_gqa=True,
                   deterministic=True, needs_grad=[True] * 3)  # fmt: skip
    ops = torch.ops.ringattn
    if world_size == 0:
        options |= dict(order=torch.zeros(1, dtype=torch.int64), group="", seq_len=None, key_seq_len=None)
        forward, backward = ops.ring_forward, ops.ring_backward
    else:
        options |= dict(world_size=world_size)
        forward, backward = ops.virtual_ring_forward, ops.virtual_ring_backward
    out, lse, kept = forward(**tensors, **options)
    call = tensors | options | dict(out=out, lse=lse, kept=kept, grad_out=out.clone(), grad_lse=lse.clone())
    backward(**call)
    with pytest.raises(error) as caught:
        backward(**call | {name: spoil(call[name])})
    assert re.match(message, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    "value, error, message",
    [
        (0, ValueError, "world_size: expected a number from 1 to 1024, got 0"),
        (-3, ValueError, "world_size: expected a number from 1 to 1024, got -3"),
        (1025, ValueError, "world_size: expected a number from 1 to 1024, got 1025"),
        (_TOO_LARGE, ValueError, "world_size: expected a number"),
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
    (lambda: ra.shard(X, 1, layout="spiral"), ValueError, "layout: expected 'contiguous', 'zigzag' or 'striped', got 'spiral'"),
    (lambda: ra.shard(X, 1, layout=1), TypeError, "layout: expected a str, got int"),
    (lambda: ra.shard(X, 1, group="nobody"), ValueError, "group: expected .*, got 'nobody'"),
    (lambda: ra.shard(X, 1, group=3), TypeError, "group: expected .*, got int"),
    (lambda: ra.unshard(X, 3), ValueError, "dim: expected a number from -3 to 2, got 3"),
    (lambda: ra.unshard(X, None), TypeError, "dim: expected an int, got None"),
    (lambda: ra.unshard(torch.tensor(1.0), 0), ValueError, "x: expected at least one dimension, got a scalar"),
    (lambda: ra.unshard([1.0], 0), TypeError, "x: expected a Tensor, got list"),
    (lambda: ra.unshard(X, 1, layout="spiral"), ValueError, "layout: expected 'contiguous', 'zigzag' or 'striped', got 'spiral'"),
    (lambda: ra.unshard(X, 1, layout=1), TypeError, "layout: expected a str, got int"),
    (lambda: ra.unshard(X, 1, seq_len=7), ValueError, "x: expected 7 tokens along dim 1 on rank 0 of 1 .*, got 6"),
    (lambda: ra.unshard(X, 1, seq_len=-1), ValueError, r"seq_len: expected a number from 0 to 2\^31 - 1, got -1"),
    (lambda: ra.unshard(X, 1, seq_len=_TOO_LARGE), ValueError, f"seq_len: expected a number .*, got {_TOO_LARGE}"),
    (lambda: ra.unshard(X, 1, seq_len=6.0), TypeError, "seq_len: expected an int.*, got float"),
    (lambda: ra.unshard(X, 1, group="nobody"), ValueError, "group: expected .*, got 'nobody'"),
    (lambda: ra.positions(6, layout="spiral"), ValueError, "layout: expected 'contiguous', 'zigzag' or 'striped', got 'spiral'"),
    (lambda: ra.positions(-1), ValueError, r"seq_len: expected a number from 0 to 2\^31 - 1, got -1"),
    (lambda: ra.positions(6.0), TypeError, "seq_len: expected an int, got float"),
    (lambda: ra.positions(6, group="nobody"), ValueError, "group: expected .*, got 'nobody'"),
    (lambda: ra.positions(6, rank=1), ValueError, "rank, world_size: expected both or neither"),
    (lambda: ra.positions(6, rank=2, world_size=2), ValueError, "rank: expected a number from 0 to 1, got 2"),
    (lambda: ra.positions(6, rank=-1, world_size=2), ValueError, "rank: expected a number from 0 to 1, got -1"),
    (lambda: ra.positions(6, rank=0, world_size=0), ValueError, "world_size: expected a number from 1 to "),
    (lambda: ra.positions(6, rank=0, world_size=1, group="x"), ValueError, "group: expected None where rank and world_size are given"),
]  # fmt: skip


@pytest.mark.parametrize("call, error, message", SHARDING, ids=[f"{i}" for i in range(len(SHARDING))])
def test_sharding(call: Callable, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert re.match(message, str(caught.value)), str(caught.value)


UNSHARD_CHANGES = {"dim": {"dim": 5}, "layout": {"layout": "spiral"}, "type of layout": {"layout": 1}, "seq_len": {"seq_len": 50},
                   "large seq_len": {"seq_len": _TOO_LARGE}, "x": {"x": None}}  # fmt: skip


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


# --- odd, and legal ---


def dense(call: Call) -> torch.Tensor:
    return F.scaled_dot_product_attention(*(call[x].double() for x in INPUTS), enable_gqa=True)


EMPTY = torch.tensor([0, 0, 0, TOKENS, TOKENS])
ODD: dict[str, Callable[[Call], Call]] = {
    "expanded batch": lambda call: {x: call[x][:1].expand(2, -1, -1, -1) for x in INPUTS},
    "expanded heads": lambda call: {"key": call["key"][:, :1].expand(-1, HQ, -1, -1), "value": call["value"][:, :1].expand(-1, HQ, -1, -1)},
    "stride 0 everywhere": lambda call: {x: torch.ones(()).expand(call[x].shape) for x in INPUTS},
    "stride 0 over tokens": lambda call: {x: call[x][:, :, :1].expand(-1, -1, TOKENS, -1) for x in INPUTS},
    "last stride 0": lambda call: {x: call[x][..., :1].expand(-1, -1, -1, 8) for x in INPUTS},
    "last stride 2": lambda call: {x: call[x].repeat_interleave(2, 3)[..., ::2] for x in INPUTS},
    "head_dim 1 of a wide tensor": lambda call: {x: call[x][..., 3:4] for x in INPUTS},
    "transposed": lambda call: {x: call[x].transpose(1, 2).contiguous().transpose(1, 2) for x in INPUTS},
    "last two swapped": lambda call: {x: call[x].transpose(2, 3).contiguous().transpose(2, 3) for x in INPUTS},
    "unaligned": lambda call: {x: torch.cat((torch.zeros(1), call[x].flatten()))[1:].view(call[x].shape) for x in INPUTS},
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
}  # fmt: skip


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
@pytest.mark.parametrize("mask", [{}, {"is_causal": True}, {"window": (2, 1)}, {"cu_seqlens": True}], ids=["full", "causal", "window", "documents"])
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
    out, lse = ra.ring_attention(*leaves, layout=layout, seq_len=seq_len, is_causal=True, enable_gqa=True, return_lse=True)
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
