"""ringattn_pace: holds a stream until a time has passed since it noted the start."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import address

from .block import kernel_module


def pace(start: np.ndarray, nanoseconds: int) -> int:
    """Returns the number of instructions that it took."""
    module = kernel_module("pace", 80)
    arguments = [np.uint64(address(start)), np.int64(nanoseconds)]
    return sum(module.launch("ringattn_pace", grid=1, block=1, args=arguments).instructions.values())


def test_pace_waits_from_the_start_it_noted() -> None:
    start = np.zeros(1, dtype=np.int64)
    pace(start, 0)
    noted = int(start[0])
    assert noted != 0
    few, many = pace(start, 1), pace(start, 20_000)
    assert int(start[0]) == noted
    assert many > 10 * few, "it did not wait"


@pytest.mark.parametrize("passed", [10**9, 5 * 10**9])
def test_pace_goes_on_at_once_when_the_time_has_passed(passed: int) -> None:
    start = np.zeros(1, dtype=np.int64)
    pace(start, 0)
    start -= passed
    assert pace(start, 10**9) == pace(start, 10)
