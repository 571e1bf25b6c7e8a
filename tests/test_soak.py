"""A short soak: a few hundred mixed calls pass, and each kind of growth fails. Long ones: make soak."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from soak import LEAKS, NOISE, Note, slope, what_grew

SOAK = Path(__file__).with_name("soak.py")

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc"),
]


def run_soak(*arguments: object) -> tuple[int, str]:
    command = [sys.executable, SOAK, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout + done.stderr


def test_a_few_hundred_calls() -> None:
    status, text = run_soak("--calls", 300, "--ranks", 3, "--seed", random.randrange(2**31))
    assert status == 0, text
    lines = text.splitlines()
    assert len({len(line) for line in lines[-4:]}) == 1, text  # one aligned line per rank
    assert [line.split()[0] for line in lines[-4:]] == ["rank", "0", "1", "2"], text


def test_growth_is_noticed() -> None:
    status, text = run_soak("--calls", 140, "--ranks", 2, "--seed", random.randrange(2**31), "--leak", *LEAKS)
    grew = [line.split()[3] for line in text.splitlines() if line.startswith("grew: rank 0: ")]
    assert status == 1 and grew == list(LEAKS), text
    assert "grew: rank 1: threads" not in text and "grew: rank 1: descriptors" not in text, text


def notes(memory: list[int], **changes: list[int]) -> list[Note]:
    fields = {"threads": [5], "waiting": [2], "descriptors": [20]} | changes
    rows = [[values[min(i, len(values) - 1)] for values in fields.values()] for i in range(len(memory))]
    return [Note(100 * i, kib, *row) for i, (kib, row) in enumerate(zip(memory, rows, strict=True))]


def test_verdicts() -> None:
    still = [random.randint(90_000, 90_400) for _ in range(100)]
    jumps = [kib + 20_000 * (i in (3, 40, 77)) for i, kib in enumerate(still)]
    assert what_grew(notes(still), 3, 0.2) == what_grew(notes(jumps), 3, 0.2) == []
    growing = [kib + 30 * i for i, kib in enumerate(jumps)]  # 0.3 KiB a call
    (text,) = what_grew(notes(growing), 3, 0.2)
    assert text.startswith("memory by 0.") and what_grew(notes(growing), 3, 0.5) == []
    assert what_grew(notes([90_000 + 10 * i for i in range(NOISE // 10)], threads=[5, 6, 5]), 3, 0.05) == []
    assert what_grew(notes(still, threads=[5, 6]), 3, 0.2) == ["threads from 5 to 6"]
    assert what_grew(notes(still, descriptors=[20, 25, 21]), 3, 0.2) == ["descriptors from 20 to 21"]
    assert what_grew(notes(still, waiting=[2, 13]), 3, 0.2) == ["threads named ringattn_wait to 13, more than 12"]
    line = [(float(i), 3.0 + 2.0 * i) for i in range(20)]
    line[7] = line[13] = (7.0, 1e6)
    assert slope(line) == pytest.approx(2.0)
