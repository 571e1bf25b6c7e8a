"""Reports 6, 15, 16 and 23: log-sums and states of blocks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cases import LAYOUTS, MASKS, Call, Case, by_group, run_on_rank, run_virtual
from ranks import run_ranks
from reference import Result, dense, relative_errors, same_bits, term_norms
from torch import Tensor

import ringattn_ext as ra

from .common import RANKS_TIMEOUT, SIZES, assert_close, packed, small_case

pytestmark = pytest.mark.timeout(120)
ops = torch.ops.ringattn

# --- 6: the layout of the log-sum ---


@pytest.mark.parametrize("P", SIZES)
def test_06_lse_has_one_shape(P: int) -> None:
    """[B, Hq, S_local], packed or not, on ranks and on virtual ranks; its values are compared with dense ones."""
    for lengths in ([3, 5], [random.randint(0, 30) for _ in range(4)] + [1]):
        case = replace(packed(*lengths, D=4), B=2, Hq=6, is_causal=random.random() < 0.5)
        for one in (case, replace(case, cu_seqlens=None)):
            layout, seed = random.choice(LAYOUTS), random.randrange(2**30)
            for _, rank, result in run_ranks(P, run_on_rank, one, seed, Call(layout), timeout=RANKS_TIMEOUT):
                own = ra.positions(one.S, layout=layout, rank=rank, world_size=P)
                assert result.lse.shape == (2, 6, len(own))
                exact = dense(one.tensors(seed), one.mask, one.scale).lse[:, :, own]
                torch.testing.assert_close(result.lse, exact, rtol=1e-10, atol=1e-10)
            assert run_virtual(one, one.tensors(seed), P, layout).lse.shape == (2, 6, one.S)


def test_06_an_lse_of_another_layout_is_refused() -> None:
    """By everything that takes one: padded with heads last, packed with heads first or last, or one dimension more."""
    B, Hq, S, D = 2, 3, 8, 4
    q = torch.randn(B, Hq, S, D)
    m, l = torch.randn(B, Hq, S), torch.rand(B, Hq, S) + 0.5  # noqa: E741
    kept, order = torch.empty(0), torch.zeros(1, dtype=torch.int64)
    options = (False, None, None, None, False, True, [True] * 3)
    places = ([0, 1, S], [0, 1, S], S, False, None, None, None, True)

    def calls(rows: Tensor) -> Iterator[Callable[[], Any]]:
        yield lambda: ops.merge_(q.clone(), rows.clone(), l.clone(), q, m, l, 1.0)
        yield lambda: ops.merge_(q.clone(), m.clone(), rows.clone(), q, m, l, 1.0)
        yield lambda: ops.merge_(q.clone(), m.clone(), l.clone(), q, rows, l, 1.0)
        yield lambda: ops.merge_(q.clone(), m.clone(), l.clone(), q, m, rows, 1.0)
        yield lambda: ops.finalize(q, rows, l, 1.0, torch.float32)
        yield lambda: ops.finalize(q, m, rows, 1.0, torch.float32)
        yield lambda: ops.delta(q, q, rows)
        yield lambda: ops.block_backward_(None, None, None, q, q, q, q, rows, m, *places)
        yield lambda: ops.block_backward_(None, None, None, q, q, q, q, m, rows, *places)
        yield lambda: ops.block_forward_(q.clone(), rows.clone(), l.clone(), q, q, q, *places)
        yield lambda: ops.ring_backward(q, None, q, q, q, q, rows, kept, order, order, "", "zigzag", S, S, *options)
        yield lambda: ops.ring_backward(q, rows, q, q, q, q, m, kept, order, order, "", "zigzag", S, S, *options)
        yield lambda: ops.virtual_ring_backward(q, None, q, q, q, q, rows, kept.view(1, 0), 1, "zigzag", *options)

    for call in calls(m):
        call()  # the right one is taken
    packed_rows = m.transpose(0, 1).reshape(Hq, B * S)
    for rows in (m.transpose(1, 2).contiguous(), packed_rows, packed_rows.T.contiguous(), m[..., None], m[:, :, :-1]):
        for number, call in enumerate(calls(rows)):
            with pytest.raises(ValueError, match="expected"):
                call()
                raise AssertionError((number, rows.shape))


# --- 15 and 16: blocks of which a row sees nothing ---


def no_keys(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The state of queries [B, Hq, S, D] that have seen no key, in their dtype."""
    return torch.zeros_like(rows), torch.full_like(rows[..., 0], -math.inf), torch.zeros_like(rows[..., 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_15_merging_with_nothing(dtype: torch.dtype) -> None:
    case = Case(B=2, Hq=4, Hkv=2, S=20, Skv=30, D=8, dtype=dtype)
    q, k, v, *_ = case.tensors(random.randrange(2**31))
    real, scale = no_keys(q), 0.4
    places = ([0, 1, 20], [0, 1, 30], 30, False, None, None, scale)
    out, lse = ops.block_forward_(*real, q, k, v, *places, True)
    for first, second in ((no_keys(q), real), (real, no_keys(q))):
        total = [t.clone() for t in first]
        ops.merge_(*total, *second, scale)
        assert all(same_bits(a, b) for a, b in zip(total, real, strict=True))
        found = ops.finalize(*total, scale, dtype)
        assert same_bits(found[0], out) and same_bits(found[1], lse)
    total = no_keys(q)
    for _ in range(3):
        ops.merge_(*total, *no_keys(q), scale)
    assert all(same_bits(a, b) for a, b in zip(total, no_keys(q), strict=True))
    out, lse = ops.finalize(*total, scale, dtype)
    assert same_bits(out, torch.zeros_like(q)) and bool((lse == -math.inf).all())


@dataclass(frozen=True)
class LowScores(Case):
    """All scores lie about -200, exactly representable in float32."""

    def tensors(self, seed: int, *, lse_gradient: bool = True) -> tuple[Tensor, ...]:
        q, k, *rest = super().tensors(seed, lse_gradient=lse_gradient)
        q = 1 + (2 * q).round().clamp(-4, 4) / 16
        k = -200 / self.D + (2 * k).round() / 16
        return q, k, *rest


def assert_low(got: Result, tensors: tuple[Tensor, ...], case: Case, note: object) -> None:
    """float32 has steps of 1.5e-5 at 200, which exp sees; what vanished would be an error of 1."""
    exact = dense(tensors, case.mask, case.scale)
    assert exact.lse.max() < -100
    errors = relative_errors(got, exact, term_norms(tensors, case.mask, case.scale))
    assert max(errors.values()) <= (1e-9 if case.dtype == torch.float64 else 1e-3), (errors, case, note)


def low_case(kind: str, **fields: Any) -> Case:
    dtype = random.choice((torch.float64, torch.float32))
    return LowScores(**vars(small_case(kind, **({"D": 8, "scale": 1.0, "dtype": dtype} | fields))))


@pytest.mark.parametrize("P", SIZES)
def test_16_low_scores_round_a_ring(P: int) -> None:
    """Windows and documents leave whole blocks and the first tiles of a block without a key for a row."""
    narrow = low_case("window", S=random.randint(150, 300), B=1, window=(random.randint(0, 5), 0))
    for case in (narrow, *(low_case(kind) for kind in MASKS)):
        layout, seed = random.choice(LAYOUTS), random.randrange(2**30)
        tensors = case.tensors(seed)
        assert_low(run_virtual(case, tensors, 2 * P + 1, layout), tensors, case, layout)
        answers = run_ranks(P, run_on_rank, case, seed, Call(layout), timeout=RANKS_TIMEOUT)
        ((_, result),) = by_group(case, layout, answers).items()
        assert_low(result, tensors, case, layout)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_16_low_scores_after_masked_blocks(dtype: torch.dtype) -> None:
    """A block that no row may see, one that some may see, and the rest, in any order, into one state; and backward."""
    tile = ops.key_tile(dtype, 8, torch.device("cpu"))
    S = 2 * tile + random.randint(1, 40)
    case = LowScores(B=1, Hq=2, Hkv=1, S=S, D=8, dtype=dtype, scale=1.0, is_causal=True)
    tensors = case.tensors(random.randrange(2**31))
    q, k, v, do, dlse = tensors
    first = S // 3  # the queries from here on are there
    rows = slice(first, S)
    cuts = sorted(random.sample(range(1, S), 4))
    blocks = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, S], strict=True)]
    blocks.sort(key=lambda block: -block.stop)  # those behind the most queries first
    exact = dense(tuple(t[:, :, rows] if t is not k and t is not v else t for t in tensors), case.mask[rows], 1.0)

    def places(block: slice) -> tuple:
        return [first, 1, S - first], [block.start, 1, block.stop - block.start], S, True, None, None, 1.0

    for order in (blocks, random.sample(blocks, len(blocks))):
        state = no_keys(q[:, :, rows])
        for block in order:
            ops.block_forward_(*state, q[:, :, rows], k[:, :, block], v[:, :, block], *places(block), False)
        out, lse = ops.finalize(*state, 1.0, dtype)
        assert_close(out, exact.out, case, 2e-5)
        assert_close(lse, exact.lse, case, 2e-5)
        delta = ops.delta(out, do[:, :, rows], dlse[:, :, rows])
        sums = [torch.zeros_like(t) for t in (q[:, :, rows], k, v)]
        for block in order:
            ops.block_backward_(
                sums[0], sums[1][:, :, block], sums[2][:, :, block], do[:, :, rows], q[:, :, rows], k[:, :, block],
                v[:, :, block], lse, delta, *places(block), True,
            )  # fmt: skip
        for got, wanted in zip(sums, exact[2:], strict=True):
            assert_close(got, wanted, case, 1e-3)  # dq is a small rest of terms of the size of k, 25


# --- 23: keys in shards, queries at the end ---


@pytest.mark.parametrize("interleave", [1, 4, 16])
@pytest.mark.parametrize("P", SIZES)
def test_23_keys_of_a_shard_at_their_global_positions(P: int, interleave: int) -> None:
    """A cache of 37 keys dealt to P shards, `interleave` at a time: each shard's state, then all merged."""
    total = 37
    for kind in ("causal", "causal_window", "causal_documents"):
        case = small_case(kind, S=total, scale=0.3)
        window = None if case.window is None else list(case.window)
        mask = (case.is_causal, window, case.options()["cu_seqlens"], case.scale)
        tensors = case.tensors(random.randrange(2**31))
        q, k, v, do, dlse = tensors
        last = random.randint(1, 5)  # queries
        rows = slice(total - last, total)
        places = [total - last, 1, last]
        chosen = (q[:, :, rows], k, v, do[:, :, rows], dlse[:, :, rows])
        exact = dense(chosen, case.mask[rows], case.scale)
        merged = no_keys(q[:, :, rows])
        for shard in range(P):
            state = no_keys(q[:, :, rows])
            starts = range(shard * interleave, total, P * interleave)
            runs = [(start, 1, min(interleave, total - start)) for start in starts]
            if interleave == 1:
                runs = [(shard, P, len(starts))]
            for i in range(0, len(runs), 2):  # two segments at a time
                own = torch.cat([start + step * torch.arange(length) for start, step, length in runs[i : i + 2]])
                segments = [number for run in runs[i : i + 2] for number in run]
                ops.block_forward_(
                    *state, q[:, :, rows], k[:, :, own], v[:, :, own], places, segments, total, *mask, False
                )
            ops.merge_(*merged, *state, case.scale)
        out, lse = ops.finalize(*merged, case.scale, case.dtype)
        assert_close(out, exact.out, (case, last))
        assert_close(lse, exact.lse, (case, last))
