"""The local building blocks: one block, one state, no ring."""

from __future__ import annotations

import math
import random

import pytest
import torch
from cases import DTYPES, LAYOUTS, MASKS, Case, random_case, restride
from reference import Result, assert_exact, same_bits
from torch import Tensor

from ringattn_ext._C import Layout

ops = torch.ops.ringattn
CPU = torch.device("cpu")


def accumulation_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_state(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = accumulation_type(query.dtype)
    rows = query.shape[:3]
    return (
        torch.zeros(query.shape, dtype=dtype),
        torch.full(rows, -torch.inf, dtype=dtype),
        torch.zeros(rows, dtype=dtype),
    )


def numbers(segments: list) -> list[int]:
    return [number for s in segments for number in (s.start, s.stride, s.length)]


def mask_options(case: Case) -> tuple:
    options = case.options()
    window = None if options["window"] is None else list(options["window"])
    return options["is_causal"], window, options["cu_seqlens"], options["scale"]


def scale_of(case: Case) -> float:
    return case.D**-0.5 if case.scale is None else case.scale


def absorb(case: Case, state: tuple, q: Tensor, k: Tensor, v: Tensor, first: int, last: int, finalize: bool) -> tuple:
    """The keys [first, last) of a whole sequence, all queries."""
    return ops.block_forward_(
        *state,
        q,
        k[:, :, first:last],
        v[:, :, first:last],
        [0, 1, case.S],
        [first, 1, last - first],
        case.key_len,
        *mask_options(case),
        finalize,
    )


@pytest.mark.parametrize("D", [1, 64, 80, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_calls_cut_on_a_tile_give_the_bits_of_one(dtype: torch.dtype, D: int) -> None:
    tile = ops.key_tile(dtype, D, CPU)
    assert tile > 0
    for kind in random.sample(MASKS, 4):
        S = random.randint(tile + 1, 4 * tile)
        case = random_case(kind, dtype=dtype, S=S, D=D, B=1)
        q, k, v, *_ = case.tensors(random.randrange(2**31))
        one, two, three = empty_state(q), empty_state(q), empty_state(q)
        expected = absorb(case, one, q, k, v, 0, S, True)
        cut = tile * random.randint(1, (S - 1) // tile)
        absorb(case, two, q, k, v, 0, cut, False)
        got = absorb(case, two, q, k, v, cut, S, True)
        for first in range(0, S, tile):
            absorb(case, three, q, k, v, first, min(first + tile, S), False)
        finalized = ops.finalize(*three, scale_of(case), dtype)
        for results in ((two, got), (three, finalized)):
            for a, b in zip((*one, *expected), (*results[0], *results[1]), strict=True):
                assert same_bits(a.contiguous(), b.contiguous()), (case, cut)


@pytest.mark.parametrize("kind", MASKS)
def test_forward_and_backward_over_the_blocks_of_a_ring(kind: str) -> None:
    """In any order of blocks, with the segments of every layout, cut anywhere: the dense result."""
    for layout in LAYOUTS:
        case = random_case(kind, dtype=random.choice(DTYPES[:2]), S=random.randint(20, 150))
        tensors = case.tensors(random.randrange(2**31))
        check_blocks(case, tensors, Layout(layout, random.randint(1, 4), case.S))


def check_blocks(case: Case, tensors: tuple[Tensor, ...], layout: Layout) -> None:
    q, k, v, do, dlse = tensors
    positions = [
        torch.cat(
            [s.start + s.stride * torch.arange(s.length) for s in layout.segments(rank)] or [torch.empty(0)]
        ).long()
        for rank in range(layout.world_size)
    ]
    segments = [numbers(layout.segments(rank)) for rank in range(layout.world_size)]
    order = random.sample(range(layout.world_size), layout.world_size)
    result = Result(torch.empty_like(q), torch.empty_like(dlse), *(torch.zeros_like(t) for t in (q, k, v)))
    for i, own in enumerate(positions):
        state = empty_state(q[:, :, own])
        part = q[:, :, own]
        for j in order:
            block = [t[:, :, positions[j]] for t in (k, v)]
            ops.block_forward_(*state, part, *block, segments[i], segments[j], case.S, *mask_options(case), False)
        out, lse = ops.finalize(*state, scale_of(case), q.dtype)
        result.out[:, :, own], result.lse[:, :, own] = out, lse
        delta = ops.delta(out, do[:, :, own], dlse[:, :, own])
        torch.testing.assert_close(delta, (out * do[:, :, own]).sum(-1) - dlse[:, :, own], rtol=1e-4, atol=1e-3)
        dq = torch.zeros_like(part)
        for j in order:
            block = [t[:, :, positions[j]] for t in (k, v)]
            dk, dv = torch.zeros_like(block[0]), torch.zeros_like(block[1])
            ops.block_backward_(
                dq, dk, dv, do[:, :, own], part, *block, lse, delta, segments[i], segments[j], case.S,
                *mask_options(case), True,
            )  # fmt: skip
            result.dk[:, :, positions[j]] += dk
            result.dv[:, :, positions[j]] += dv
        result.dq[:, :, own] = dq
    assert_exact(result, tensors, case.mask, case.scale, (case, layout))


def backward_arguments(case: Case) -> tuple[tuple[Tensor, ...], tuple]:
    """query, key, value and what block_backward_ takes after the accumulators, for a block that is the whole."""
    q, k, v, do, dlse = case.tensors(random.randrange(2**31))
    out, lse = absorb(case, empty_state(q), q, k, v, 0, case.key_len, True)
    delta = ops.delta(out, do, dlse)
    places = ([0, 1, case.S], [0, 1, case.key_len], case.key_len)
    return (q, k, v), (do, q, k, v, lse, delta, *places, *mask_options(case), True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_adds_to_accumulators_in_any_strides(dtype: torch.dtype) -> None:
    case = random_case(random.choice(MASKS), dtype=dtype, S=100)
    inputs, arguments = backward_arguments(case)
    plain = [torch.zeros(t.shape, dtype=accumulation_type(dtype)) for t in inputs]
    ops.block_backward_(*plain, *arguments)
    for how in ("transposed", "packed", "padded"):
        before = [torch.randint(-8, 8, t.shape).to(t.dtype) for t in plain]
        rooms = [restride(t, how) for t in before]
        ops.block_backward_(*rooms, *arguments)
        for room, start, added in zip(rooms, before, plain, strict=True):
            torch.testing.assert_close(
                room.contiguous(), start + added, rtol=1e-5, atol=2e-5 * float(added.abs().max())
            )
            assert bool(room.isfinite().all())


@pytest.mark.parametrize("wanted", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1), (0, 0, 0)])
def test_backward_gives_the_same_bits_for_a_part_of_the_gradients(wanted: tuple[int, ...]) -> None:
    case = random_case(random.choice(MASKS), dtype=random.choice(DTYPES), S=100)
    inputs, arguments = backward_arguments(case)
    dtype = accumulation_type(case.dtype)
    whole = [torch.zeros(t.shape, dtype=dtype) for t in inputs]
    ops.block_backward_(*whole, *arguments)
    some = [torch.zeros(t.shape, dtype=dtype) if w else None for t, w in zip(inputs, wanted, strict=True)]
    ops.block_backward_(*some, *arguments)
    assert all(s is None or same_bits(s, w) for s, w in zip(some, whole, strict=True))


def test_nothing_is_written_around_a_state() -> None:
    case = random_case("causal", dtype=torch.float32, S=70)
    q, k, v, *_ = case.tensors(random.randrange(2**31))
    rooms, state = [], []
    for tensor in empty_state(q):
        room = torch.full((tensor.numel() + 64,), torch.nan)
        room[32:-32] = tensor.flatten()
        rooms.append(room)
        state.append(room[32:-32].view(tensor.shape))
    out, lse = absorb(case, tuple(state), q, k, v, 0, case.S, True)
    assert bool(out.isfinite().all()) and bool(lse.isfinite().all())
    assert all(bool(t.isfinite().all()) for t in state)
    assert all(bool(room[:32].isnan().all()) and bool(room[-32:].isnan().all()) for room in rooms)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_nobody_sees_leave_the_state_alone(dtype: torch.dtype) -> None:
    case = Case(S=40, D=8, dtype=dtype, is_causal=True)
    q, k, v, *_ = case.tensors(random.randrange(2**31))
    state = tuple(torch.randn(t.shape, dtype=t.dtype).abs() for t in empty_state(q))
    before = [t.clone() for t in state]
    arguments = ([0, 1, 40], [40, 1, 40], 80, True, None, None, None, False)  # all keys lie after the queries
    poison = torch.full_like(k, torch.nan)
    ops.block_forward_(*state, q, poison, poison, *arguments)
    assert all(same_bits(a, b) for a, b in zip(state, before, strict=True))
    ops.block_forward_(*state, q, k[:, :, :0], v[:, :, :0], [0, 1, 40], [], 80, False, None, None, None, False)
    assert all(same_bits(a, b) for a, b in zip(state, before, strict=True))


# --- merging and finalizing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_merge_against_one_pass(dtype: torch.dtype, scale: float) -> None:
    case = Case(B=2, Hq=4, Hkv=2, S=60, Skv=90, D=16, dtype=dtype, scale=scale)
    tensors = case.tensors(random.randrange(2**31))
    q, k, v, *_ = tensors
    cuts = sorted(random.randrange(90) for _ in range(3))  # no block starts behind the last key
    states = []
    for first, last in zip((0, *cuts), (*cuts, 90), strict=True):
        states.append(empty_state(q))
        absorb(case, states[-1], q, k, v, first, last, False)
    random.shuffle(states)
    total = states[0]
    for other in states[1:]:
        ops.merge_(*total, *other, scale)
    got = ops.finalize(*total, scale, dtype)
    expected = absorb(case, empty_state(q), q, k, v, 0, 90, True)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10 if dtype == torch.float64 else 2e-5, atol=1e-5)


ROWS = {
    "empty": (0.0, -math.inf, 0.0),
    "one": (0.7, 1.5, 1.0),
    "small": (0.3, -2.0, 0.5),
    "huge": (2.0, 1e4, 3.0),
    "hugely negative": (-2.0, -1e4, 3.0),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("second", ROWS)
@pytest.mark.parametrize("first", ROWS)
def test_merge_of_special_rows(first: str, second: str, dtype: torch.dtype) -> None:
    scale = 0.25

    def state(name: str) -> tuple[Tensor, ...]:
        o, m, l = ROWS[name]  # noqa: E741
        rows = [torch.full((1, 2, 3), x, dtype=dtype) for x in (m, l)]
        return torch.full((1, 2, 3, 5), o, dtype=dtype), *rows

    total = state(first)
    ops.merge_(*total, *state(second), scale)
    out, lse = ops.finalize(*total, scale, dtype)
    rows = [ROWS[first], ROWS[second]]
    top = max(m for _, m, _ in rows)
    if top == -math.inf:
        assert bool((out == 0).all()) and bool((lse == -math.inf).all())
        assert all(same_bits(a, b) for a, b in zip(total, state("empty"), strict=True))
        return
    weights = [math.exp(scale * (m - top)) if m > -math.inf else 0.0 for _, m, _ in rows]
    denominator = sum(w * l for w, (_, _, l) in zip(weights, rows, strict=True))  # noqa: E741
    expected = sum(w * o for w, (o, _, _) in zip(weights, rows, strict=True)) / denominator
    torch.testing.assert_close(out, torch.full_like(out, expected))
    torch.testing.assert_close(lse, torch.full_like(lse, scale * top + math.log(denominator)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_finalize(dtype: torch.dtype) -> None:
    o = torch.randn(2, 3, 20, 8, dtype=accumulation_type(dtype))
    m, l = o.new_empty(2, 3, 20).normal_(), o.new_empty(2, 3, 20).uniform_(0.5, 9.0)  # noqa: E741
    o[0, 1, 4], m[0, 1, 4], l[0, 1, 4] = 0.0, -math.inf, 0.0
    before = [t.clone() for t in (o, m, l)]
    out, lse = ops.finalize(o, m, l, 0.3, dtype)
    assert out.dtype == dtype and lse.dtype == o.dtype
    expected = (o.double() / l.double()[..., None]).nan_to_num(0.0)
    torch.testing.assert_close(
        out.double(),
        expected,
        rtol=torch.finfo(dtype).eps,
        atol=float(torch.finfo(dtype).smallest_normal) * torch.finfo(dtype).eps,
    )
    torch.testing.assert_close(lse, (0.3 * m.double() + l.double().log()).to(lse.dtype))
    assert bool((out[0, 1, 4] == 0).all()) and lse[0, 1, 4] == -math.inf
    assert all(same_bits(a, b) for a, b in zip((o, m, l), before, strict=True))


@pytest.mark.parametrize("strides", ["contiguous", "transposed", "packed", "padded", "stepping"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_delta(dtype: torch.dtype, strides: str) -> None:
    out, do = (restride(torch.randn(2, 3, 20, 17).to(dtype), strides) for _ in range(2))
    grad_lse = torch.randn(2, 3, 20, dtype=accumulation_type(dtype))
    for dlse in (None, grad_lse):
        got = ops.delta(out, do, dlse)
        assert got.dtype == accumulation_type(dtype)
        exact = (out.double() * do.double()).sum(-1) - (0 if dlse is None else dlse.double())
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=10 * tolerance)
