"""Schedules: played through for all ranks, with blocks and accumulators as symbols. See ring_simulation.py."""

import random

import numpy as np
import pytest
from mask_cases import LAYOUTS, MaskCase, mask_cases
from ring_simulation import (
    backward_schedules,
    check_backward,
    check_forward,
    forward_schedules,
    pair_counts,
)

from ringattn_ext._C import (
    NONE,
    Layout,
    Mask,
    Source,
    Visibility,
    backward_schedule,
    forward_schedule,
    reach,
    visibility,
    visible_pairs,
)

RINGS = range(1, 18)


def expected_reach(counts: np.ndarray) -> int:
    P = len(counts)
    return max(((int(i) - int(j)) % P for i, j in np.argwhere(counts)), default=0)


def prove(queries: Layout, keys: Layout, case: MaskCase) -> None:
    mask = case.mask()
    allowed = case.allowed(range(queries.seq_len), range(keys.seq_len))
    counts = pair_counts(queries, keys, allowed)
    R = expected_reach(counts)
    assert reach(queries, keys, mask) == R

    forward = forward_schedules(queries, keys, mask)
    check_forward(forward, queries, keys, allowed)
    assert {len(own) for own in forward} == {R + 1}
    ended = [own[-1].block for own in forward]

    backward = backward_schedules(queries, keys, mask)
    check_backward(backward, ended, counts)
    assert {len(own) for own in backward} == {R + 1}
    for own in backward:
        assert sum(step.next_block != NONE for step in own) == max(R - 1, 0)
        assert sum(step.outgoing_gradient != NONE for step in own) == R
    for rank, own in enumerate(backward):
        assert [step.source for step in own[1:-1]] == [Source.received] * (R - 1)
        assert (own[0].source, own[-1].source) == (Source.kept if R else Source.own, Source.own)
        assert (own[0].block, own[-1].block) == (ended[rank], rank)
        for step in own[1:]:
            assert len({step.local_gradient, step.outgoing_gradient, step.incoming_gradient}) == 3


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("world_size", RINGS)
def test_all_masks(name: str, world_size: int) -> None:
    for seq_len in {0, 1, world_size - 1, world_size, 2 * world_size + 1, 53, random.randrange(100)}:
        layout = Layout(name, world_size, seq_len)
        cases = mask_cases(seq_len)
        for case in cases[:2] + random.sample(cases[2:], 3):
            print(layout.kind, world_size, seq_len, case)
            prove(layout, layout, case)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("world_size", RINGS)
def test_cross_attention(name: str, world_size: int) -> None:
    for lengths in ((40, 17), (3, 40), (0, 9), (9, 0), (world_size, 2 * world_size)):
        prove(*(Layout(name, world_size, length) for length in lengths), MaskCase(lengths[1]))


@pytest.mark.parametrize("world_size", RINGS)
def test_reach_of_a_causal_window_on_contiguous_shards(world_size: int) -> None:
    for b in range(1, 7):
        layout = Layout("contiguous", world_size, world_size * b)
        for w in range(world_size * b + 3):
            assert reach(layout, layout, Mask(world_size * b, w, 0)) == min(-(-w // b), world_size - 1), (b, w)


@pytest.mark.parametrize("name", LAYOUTS)
def test_reach_without_and_with_documents(name: str) -> None:
    for P in RINGS:
        layout = Layout(name, P, 6 * P)
        assert reach(layout, layout, Mask(6 * P)) == P - 1
        assert reach(layout, layout, Mask(6 * P, right=0)) == P - 1
        assert reach(layout, layout, Mask(6 * P, 0, 0)) == 0  # each token sees itself
    contiguous = Layout("contiguous", 4, 24)
    assert reach(contiguous, contiguous, Mask(24, documents=[0, 6, 12, 18, 24])) == 0
    assert reach(contiguous, contiguous, Mask(24, right=0, documents=[0, 7, 7, 24])) == 2


@pytest.mark.parametrize("world_size", RINGS[1:])
def test_zigzag_gives_every_rank_the_same_causal_work(world_size: int) -> None:
    P = world_size
    for N in (2 * P, 2 * P + 1, 4 * P, 6 * P - 1, 64 * P, 997):
        layout, mask = Layout("zigzag", P, N), Mask(N, right=0)
        segments = [layout.segments(rank) for rank in range(P)]
        units, pairs = [], []
        for rank in range(P):
            blocks = [step.block for step in forward_schedule(layout, layout, mask, rank)]
            rectangles = [(q, k) for block in blocks for q in segments[rank] for k in segments[block]]
            units.append(sum(visibility(q, k, mask) != Visibility.skip for q, k in rectangles))
            pairs.append(sum(visible_pairs(q, k, mask) for q, k in rectangles))
        assert units == [2 * P + 1] * P
        assert sum(pairs) == N * (N + 1) // 2
        if N % (2 * P) == 0:
            assert len(set(pairs)) == 1


@pytest.mark.parametrize("rank", [-1, 4])
def test_bad_ranks(rank: int) -> None:
    layout = Layout("zigzag", 4, 8)
    for make in (forward_schedule, backward_schedule):
        with pytest.raises(ValueError, match="rank"):
            make(layout, layout, Mask(8), rank)
