"""The doctor's self-test: two ranks over gloo, and two virtual ranks on a GPU, in child processes with a time limit."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from ringattn_ext._doctor.children import Child, wait
from ringattn_ext._doctor.facts import SelfTest

START_LIMIT_S = 60.0  # for importing torch and the package: some three seconds, but not where all cores are busy
LIMIT_S = 15.0  # for all the rest: less than a second is usual
GROUP_TIMEOUT_S = 8.0  # for a rank that waits for another one: it then says so, within the limit
WORLD_SIZE = 2


def over_gloo() -> SelfTest:
    with tempfile.TemporaryDirectory(prefix="ringattn-doctor-") as name:
        folder = Path(name)
        arguments = (WORLD_SIZE, folder / "store", GROUP_TIMEOUT_S)
        ranks = [
            Child(f"rank {rank}", "rank.py", folder, "gloo", rank, *arguments, GLOO_SOCKET_IFNAME="lo")
            for rank in range(WORLD_SIZE)
        ]
        return _run("2 ranks over gloo", ranks)


def on_gpu(index: int) -> SelfTest:
    with tempfile.TemporaryDirectory(prefix="ringattn-doctor-") as name:
        child = Child(f"GPU {index}", "rank.py", Path(name), "virtual", f"cuda:{index}")
        return _run(f"2 virtual ranks on GPU {index}", [child])


def _run(name: str, children: list[Child]) -> SelfTest:
    start = time.monotonic()
    wait(children, LIMIT_S, START_LIMIT_S)
    seconds = time.monotonic() - start
    failures, errors = [], []
    for child in children:
        answer = child.answers()
        if "raised" in answer:
            failures.append(f"{child.name}: {answer['raised']}")
        elif "errors" not in answer or not child.ended_well():
            failures.append(f"{child.name} {child.ending()}")
        else:
            errors += answer["errors"]
    failures += [
        f"{error['what']} is off by {error['error']:.1e}, {error['tolerance']:.0e} is tolerated"
        for error in errors
        if not error["error"] <= error["tolerance"]
    ]
    if failures:
        return SelfTest(name, False, seconds, "; ".join(failures))
    worst: dict[str, float] = {}
    for error in errors:
        dtype = error["what"].split()[0]
        worst[dtype] = max(worst.get(dtype, 0.0), error["error"])
    return SelfTest(name, True, seconds, ", ".join(f"{dtype} exact to {error:.0e}" for dtype, error in worst.items()))
