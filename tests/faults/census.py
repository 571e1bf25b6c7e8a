"""What a process holds that it may forget to give back."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from pathlib import Path


def what_a_process_holds() -> dict[str, int]:
    """Open files of this process, and its threads by name."""
    names: Counter[str] = Counter()
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            names[path.read_text().strip()] += 1
    return {"open files": len(os.listdir("/proc/self/fd")), **names}


def what_it_holds_soon(expected: dict[str, int] | None = None, patience: float = 2.0) -> dict[str, int]:
    """The same, after waiting a little for threads that are about to end."""
    deadline = time.monotonic() + patience
    while True:
        now = what_a_process_holds()
        if expected and all(now[what] <= expected.get(what, 0) for what in now) or time.monotonic() > deadline:
            return now
        time.sleep(0.02)


def resident_kib() -> int:
    """Memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
