"""Times two things alternately, and what the machine can do: matrix products, and reading memory."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Run = Callable[[], Any]
SHORTEST = 0.02  # seconds; what is shorter runs several times for one measurement


class Times(NamedTuple):
    """Seconds of every pair."""

    ours: list[float]
    other: list[float]

    @property
    def seconds(self) -> float:
        return statistics.median(self.ours)

    @property
    def ratio(self) -> float:
        """How many times faster ours is: the median over the pairs."""
        return statistics.median(other / ours for ours, other in zip(self.ours, self.other, strict=True))


def seconds(run: Run, repeats: int = 1, before: Run | None = None) -> float:
    """The mean time of `repeats` runs; what comes before each of them is not counted."""
    total = 0.0
    for _ in range(repeats):
        if before is not None:
            before()
        begin = time.perf_counter()
        run()
        total += time.perf_counter() - begin
    return total / repeats


def repeats_for(once: float) -> int:
    return max(1, math.ceil(SHORTEST / max(once, 1e-9)))


def alternate(ours: Callable[[], float], other: Callable[[], float], pairs: int) -> Times:
    """Calls both `pairs` times, each first in turn; they return the seconds that they took."""
    times = Times([], [])
    for pair in range(pairs):
        both = [(times.ours, ours), (times.other, other)]
        for found, timed in both if pair % 2 == 0 else reversed(both):
            found.append(timed())
    return times


def compare(ours: Run, other: Run, pairs: int, before: Run | None = None) -> Times:
    """The times of two runs in this process, each warm; `before` comes before ours."""
    sides = [(ours, before), (other, None)]
    repeats = [repeats_for(min(seconds(run, 1, first) for _ in range(2))) for run, first in sides]
    return alternate(lambda: seconds(ours, repeats[0], before), lambda: seconds(other, repeats[1]), pairs)


def product_rate(dtype: torch.dtype, size: int, runs: int = 5) -> float:
    """flop/s of torch.matmul of two square matrices."""
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    torch.matmul(a, b)
    return 2 * size**3 / statistics.median(seconds(lambda: torch.matmul(a, b)) for _ in range(runs))


def memory_rate(size: int, runs: int = 5) -> float:
    """Bytes/s at which memory is read: the faster one of a sum and of a scalar product of `size` bytes."""
    numbers = torch.ones(size // 4)
    half = numbers.split(len(numbers) // 2)
    readers = (lambda: numbers.sum(), lambda: torch.dot(half[0], half[1]))
    return max(size / statistics.median(seconds(reader) for _ in range(runs)) for reader in readers)
