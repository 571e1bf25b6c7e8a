"""Masks: intervals, visibility and pair counts against the definition, token by token."""

import random

import numpy as np
import pytest
from mask_cases import LAYOUTS, MaskCase, mask_cases, positions, random_documents

from ringattn_ext._C import Layout, Mask, Segment, Visibility, visibility, visible_pairs

LENGTHS = (0, 1, 2, 7, 16, 31)
LAST = 2**31 - 2  # the largest position


def expected_visibility(allowed: np.ndarray) -> Visibility:
    if not allowed.any():
        return Visibility.skip
    return Visibility.full if allowed.all() else Visibility.partial


def check_pair(case: MaskCase, q: Segment, k: Segment) -> None:
    allowed = case.allowed(positions([q]), positions([k]))
    where = f"queries {q}, keys {k}, {case}"
    assert visibility(q, k, case.mask()) == expected_visibility(allowed), where
    assert visible_pairs(q, k, case.mask()) == allowed.sum(), where


@pytest.mark.parametrize("seq_len", LENGTHS)
def test_intervals_hold_what_is_allowed_and_never_go_back(seq_len: int) -> None:
    for case in [case for _ in range(8) for case in mask_cases(seq_len)]:
        mask = case.mask()
        keys = np.arange(-2, seq_len + 2)
        intervals = np.array([mask.interval(p) for p in range(seq_len)]).reshape(seq_len, 2)
        inside = (intervals[:, :1] <= keys) & (keys <= intervals[:, 1:])
        assert (inside == case.allowed(range(seq_len), keys)).all(), case
        assert (np.diff(intervals, axis=0) >= 0).all(), case


def test_intervals_of_cross_attention() -> None:
    """More queries than keys, and no keys at all."""
    for key_count in (0, 1, 5):
        mask = Mask(key_count)
        assert {mask.interval(p) for p in (0, 4, 5, 100, LAST)} == {(0, key_count - 1)}


def random_segment(first: int, last: int, stride: int) -> Segment:
    """At most 9 tokens of [first, last], perhaps none."""
    start = random.randint(first, last)
    step = random.choice([1, random.randint(1, stride)])
    return Segment(start, step, random.randint(0, min(9, (last - start) // step + 1)))


@pytest.mark.parametrize("stride", [1, 3, 12])
def test_visibility_is_exact(stride: int) -> None:
    for seq_len in (1, 5, 40):
        for case in [case for _ in range(4) for case in mask_cases(seq_len)]:
            for _ in range(12):
                check_pair(case, *(random_segment(0, seq_len - 1, stride) for _ in range(2)))


def test_visibility_for_the_largest_positions() -> None:
    near = LAST - 50
    for _ in range(3000):
        sides = [
            random.choice([-1, 0, random.randint(1, 60), random.randint(1, LAST), LAST, LAST + 1, 2**62])
            for _ in range(2)
        ]
        cuts = [near + cut for cut in random_documents(50)][1:-1]
        case = MaskCase(LAST + 1, *sides, documents=random.choice([None, (0, *cuts, LAST + 1)]))
        q, k = (random_segment(random.choice([0, near]), LAST, 2 ** random.randint(0, 30)) for _ in range(2))
        check_pair(case, q, k)


def test_visibility_over_the_largest_distance() -> None:
    first, last = Segment(0, 1, 1), Segment(LAST, 1, 1)
    for width in (LAST - 1, LAST):
        case = MaskCase(LAST + 1, width, width)
        assert visibility(first, last, case.mask()) == (Visibility.full if width == LAST else Visibility.skip)
        for q, k in ((first, last), (last, first), (first, Segment(0, LAST, 2)), (Segment(0, LAST, 2), first)):
            check_pair(case, q, k)


def test_visibility_with_empty_segments() -> None:
    one, none = Segment(3, 1, 1), Segment(3, 1, 0)
    for q, k in ((one, none), (none, one), (none, none)):
        check_pair(MaskCase(8), q, k)
        check_pair(MaskCase(8, 1, 0, (0, 3, 3, 8)), q, k)


@pytest.mark.parametrize("name", LAYOUTS)
def test_pairs_of_all_ranks_add_up(name: str) -> None:
    for P, seq_len in ((1, 9), (3, 20), (4, 7), (5, 31), (6, 4)):
        layout = Layout(name, P, seq_len)
        segments = [s for rank in range(P) for s in layout.segments(rank)]
        for case in mask_cases(seq_len):
            mask = case.mask()
            pairs = sum(visible_pairs(q, k, mask) for q in segments for k in segments)
            assert pairs == case.allowed(range(seq_len), range(seq_len)).sum(), case


def test_known_pair_counts() -> None:
    whole = Segment(0, 1, 100)
    assert visible_pairs(whole, whole, Mask(100)) == 100 * 100
    assert visible_pairs(whole, whole, Mask(100, right=0)) == 100 * 101 // 2
    assert visible_pairs(whole, whole, Mask(100, 9, 0)) == 10 * 100 - 9 * 10 // 2
    assert visible_pairs(whole, whole, Mask(100, documents=[0, 0, 30, 30, 100, 100])) == 30 * 30 + 70 * 70
    assert visible_pairs(whole, whole, Mask(100, right=0, documents=[0, 30, 100])) == 30 * 31 // 2 + 70 * 71 // 2


def test_unbounded_sides() -> None:
    """-1 and everything that is wider than the sequence mean the same."""
    for side in (-1, 7, 8, 2**31 - 1, 2**31, 2**63 - 1):
        mask = Mask(8, side, side)
        assert [mask.interval(p) for p in range(8)] == [(0, 7)] * 8


def test_a_mask_keeps_its_documents() -> None:
    bounds = [0, 3, 8]
    mask = Mask(8, documents=bounds)
    bounds[1] = 5
    del bounds
    assert [mask.interval(p) for p in (0, 2, 3, 7)] == [(0, 2), (0, 2), (3, 7), (3, 7)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1,), "key_count"),
        ((2**31,), "key_count"),
        ((8, -2), "window: expected entries >= -1"),
        ((8, 0, -2), "window: expected entries >= -1"),
        ((8, 0, 0, []), "documents"),
        ((8, 0, 0, [0]), "documents"),
        ((8, 0, 0, [1, 8]), "documents"),
        ((8, 0, 0, [0, 7]), "documents"),
        ((8, 0, 0, [0, 5, 4, 8]), "documents: expected bounds that do not decrease"),
    ],
)
def test_bad_masks(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mask(*arguments)


@pytest.mark.parametrize("arguments", [(-1, 1, 1), (0, 0, 1), (0, 1, -1)])
def test_bad_segments(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="Segment"):
        Segment(*arguments)
