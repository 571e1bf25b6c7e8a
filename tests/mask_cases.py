"""Masks for the tests of core: what a mask means by definition, and a list of all kinds of them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ringattn_ext._C import Layout, Mask, Segment

LAYOUTS = ("contiguous", "zigzag", "striped")


def positions(segments: Iterable[Segment]) -> list[int]:
    return [p for s in segments for p in range(s.start, s.start + s.stride * s.length, s.stride)]


def owners(layout: Layout) -> np.ndarray:
    """[N]: the rank that owns each token."""
    result = np.full(layout.seq_len, -1)
    for rank in range(layout.world_size):
        result[positions(layout.segments(rank))] = rank
    return result


@dataclass(frozen=True)
class MaskCase:
    key_count: int
    left: int = -1
    right: int = -1
    documents: tuple[int, ...] | None = None

    def mask(self) -> Mask:
        return Mask(self.key_count, self.left, self.right, None if self.documents is None else list(self.documents))

    def allowed(self, queries: Iterable[int], keys: Iterable[int]) -> np.ndarray:
        """The definition, [queries, keys]: may the query at one global position see the key at another?"""
        q = np.array(list(queries), dtype=np.int64)[:, None]
        k = np.array(list(keys), dtype=np.int64)[None, :]
        result = (k >= 0) & (k < self.key_count) & (q == q)
        if self.left != -1:
            result &= q - k <= self.left
        if self.right != -1:
            result &= k - q <= self.right
        for start, end in pairwise(self.documents or ()):
            result &= ((start <= q) & (q < end)) == ((start <= k) & (k < end))
        return result


def random_documents(count: int) -> tuple[int, ...]:
    """Bounds from 0 to `count`; some documents are empty, also the first or the last one."""
    cuts = [random.randint(0, count) for _ in range(random.randint(1, 5))]
    cuts += random.choices(cuts, k=2)
    cuts += random.choices([0, count], k=random.randint(0, 2))
    return (0, *sorted(cuts), count)


def mask_cases(count: int) -> list[MaskCase]:
    """Masks of every kind over `count` tokens."""
    width = [random.randint(1, max(1, count // 2)) for _ in range(6)]
    cases = [
        MaskCase(count),
        MaskCase(count, right=0),
        MaskCase(count, 0, 0),
        MaskCase(count, 0, -1),
        MaskCase(count, width[0], 0),
        MaskCase(count, 0, width[1]),
        MaskCase(count, -1, width[2]),
        MaskCase(count, width[3], -1),
        MaskCase(count, width[4], width[5]),
        MaskCase(count, count, 2**40),  # wider than the sequence
    ]
    if count > 0:
        cases += [
            MaskCase(count, documents=random_documents(count)),
            MaskCase(count, documents=tuple(range(count + 1))),
            MaskCase(count, right=0, documents=random_documents(count)),
            MaskCase(count, width[0], 0, random_documents(count)),
            MaskCase(count, width[3], width[5], random_documents(count)),
        ]
    return cases
