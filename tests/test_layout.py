"""Layouts: every token has one owner, cut points are where the definition puts them, lengths balance."""

import random

import pytest
from mask_cases import LAYOUTS, positions

from ringattn_ext._C import Layout

RINGS = range(1, 18)
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 53, 101, 499)


def all_positions(layout: Layout) -> list[list[int]]:
    return [positions(layout.segments(rank)) for rank in range(layout.world_size)]


def lengths_for(world_size: int) -> list[int]:
    # N = 0, N < P, around P, around the 2P chunks of zigzag, primes, anything.
    return [*range(2 * world_size + 3), 4 * world_size + 1, *PRIMES, *(random.randrange(2000) for _ in range(5))]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("world_size", RINGS)
def test_every_token_has_exactly_one_owner(name: str, world_size: int) -> None:
    for seq_len in lengths_for(world_size):
        parts = all_positions(Layout(name, world_size, seq_len))
        assert sorted(p for part in parts for p in part) == list(range(seq_len))


@pytest.mark.parametrize("world_size", RINGS)
def test_cut_points(world_size: int) -> None:
    P = world_size
    for N in lengths_for(P):
        chunks = [list(range(c * N // P, (c + 1) * N // P)) for c in range(P)]
        assert all_positions(Layout("contiguous", P, N)) == chunks

        halves = [list(range(c * N // (2 * P), (c + 1) * N // (2 * P))) for c in range(2 * P)]
        pairs = [halves[rank] + halves[2 * P - 1 - rank] for rank in range(P)]
        assert all_positions(Layout("zigzag", P, N)) == pairs

        assert all_positions(Layout("striped", P, N)) == [list(range(rank, N, P)) for rank in range(P)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_ring_of_one_is_one_segment(name: str) -> None:
    for seq_len in lengths_for(1):
        segments = Layout(name, 1, seq_len).segments(0)
        assert [(s.start, s.stride, s.length) for s in segments] == [(0, 1, seq_len)] * (seq_len > 0)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("world_size", RINGS)
def test_segments_are_few_and_never_empty(name: str, world_size: int) -> None:
    most = 2 if name == "zigzag" and world_size > 1 else 1
    for seq_len in lengths_for(world_size):
        layout = Layout(name, world_size, seq_len)
        for rank in range(world_size):
            segments = layout.segments(rank)
            assert len(segments) <= most
            assert all(s.length > 0 for s in segments)
            assert layout.length(rank) == sum(s.length for s in segments)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("world_size", RINGS)
def test_capacity_bounds_the_longest_rank(name: str, world_size: int) -> None:
    for seq_len in lengths_for(world_size):
        layout = Layout(name, world_size, seq_len)
        longest = max(map(layout.length, range(world_size)))
        # A zigzag rank may hold one chunk that is rounded up and one that is not.
        assert longest <= layout.capacity <= longest + (name == "zigzag")


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("world_size", RINGS)
def test_equal_lengths_when_the_ring_divides_the_sequence(name: str, world_size: int) -> None:
    for local in range(40):  # odd ones too, which zigzag cuts into unequal halves
        layout = Layout(name, world_size, world_size * local)
        assert [layout.length(rank) for rank in range(world_size)] == [local] * world_size


def test_seven_tokens_on_four_ranks() -> None:
    assert all_positions(Layout("contiguous", 4, 7)) == [[0], [1, 2], [3, 4], [5, 6]]
    assert all_positions(Layout("zigzag", 4, 7)) == [[6], [0, 5], [1, 4], [2, 3]]
    assert all_positions(Layout("striped", 4, 7)) == [[0, 4], [1, 5], [2, 6], [3]]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_longest_sequence(name: str) -> None:
    N, P = 2**31 - 1, 1000
    layout = Layout(name, P, N)
    segments = [s for rank in range(P) for s in layout.segments(rank)]
    assert sum(s.length for s in segments) == N
    assert max(s.start + s.stride * (s.length - 1) for s in segments) == N - 1
    if name != "striped":
        ordered = sorted(segments, key=lambda s: s.start)
        assert [s.start + s.length for s in ordered] == [*(s.start for s in ordered[1:]), N]


def test_properties() -> None:
    layout = Layout("striped", 3, 10)
    assert (layout.kind, layout.world_size, layout.seq_len) == ("striped", 3, 10)
    assert repr(layout.segments(1)) == "[Segment(start=1, stride=3, length=3)]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ring", 2, 8), "layout: expected .*'contiguous', 'zigzag' or 'striped', got 'ring'"),
        (("zigzag", 0, 8), "world_size: expected .* got 0"),
        (("zigzag", 2**30, 8), f"world_size: expected .* got {2**30}"),
        (("zigzag", 2, -1), "seq_len: expected .* got -1"),
        (("zigzag", 2, 2**31), f"seq_len: expected .* got {2**31}"),
    ],
)
def test_bad_layouts(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(*arguments)


@pytest.mark.parametrize("rank", [-1, 4])
def test_bad_ranks(rank: int) -> None:
    for method in (Layout("zigzag", 4, 8).segments, Layout("zigzag", 4, 8).length):
        with pytest.raises(ValueError, match=f"rank: expected a number from 0 to 3, got {rank}"):
            method(rank)
