"""One measured case, how it is printed, and the line that names the machine."""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import ringattn_ext as ra


@dataclass
class Result:
    """ratio: the other's time over ours. share: of the matrix product's rate, or of memory's where unit is GB/s."""

    group: str
    name: str
    threads: int
    seconds: float
    rate: float  # flop/s or bytes/s
    unit: str  # GFLOP/s or GB/s
    other: str  # what it is compared with
    ratio: float
    bar: float | None = None  # of the ratio
    share: float | None = None
    share_bar: float | None = None
    wrong: int = 0
    checked: int = 0
    other_wrong: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"reached": reached(self.ratio, self.bar)}


def reached(number: float | None, bar: float | None) -> bool | None:
    """Whether a number reaches its bar; None if there is none."""
    return None if number is None or bar is None else number >= bar


def word(number: float | None, bar: float | None) -> str:
    return {None: "", True: "yes", False: "no"}[reached(number, bar)]


HEADING = (
    f"{'case':<42}{'threads':>7}{'time':>12}{'rate':>10} {'':<7}{'share':>6} {'bar':>5} {'':<4}"
    f"{'ratio':>7} {'bar':>6} {'':<4}{'to':<23}wrong"
)


def line(result: Result) -> str:
    """Aligned with HEADING."""
    share, share_bar = percent(result.share), percent(result.share_bar)
    bar = "" if result.bar is None else f"{result.bar:.2f}x"
    theirs = f", {result.other_wrong} of theirs" if result.other_wrong else ""
    return (
        f"{result.name:<42}{result.threads:>7}{1e3 * result.seconds:>9.2f} ms"
        f"{result.rate / 1e9:>10.1f} {result.unit:<7}"
        f"{share:>6} {share_bar:>5} {word(result.share, result.share_bar):<4}"
        f"{result.ratio:>6.2f}x {bar:>6} {word(result.ratio, result.bar):<4}{result.other:<23}"
        f"{result.wrong} of {result.checked}{theirs}"
    )


def percent(number: float | None) -> str:
    return "" if number is None else f"{100 * number:.0f} %"


def cpu_name() -> str:
    file = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", file.read_text() if file.is_file() else "", re.MULTILINE)
    return found[1] if found else "unknown CPU"


def instruction_set() -> str:
    """The one of our kernels: the best that the CPU has, or what RINGATTN_CPU asks for, which is refused if it cannot
    be had."""
    from ringattn_ext._doctor.collect import _instruction_sets

    torch.ops.ringattn.key_tile(torch.float32, 64, torch.device("cpu"))  # here it is chosen, or refused
    return os.environ.get("RINGATTN_CPU") or _instruction_sets()[-1]


def machine(threads: list[int]) -> dict[str, Any]:
    """What the results were measured on and with."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_set": instruction_set(),
        "torch_instruction_set": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "ringattn_ext": ra.__version__,
        "threads": threads,
    }


def machine_line(facts: dict[str, Any]) -> str:
    threads = " and ".join(map(str, facts["threads"]))
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['instruction_set']}; torch {facts['torch']} "
        f"({facts['torch_instruction_set']}), ringattn_ext {facts['ringattn_ext']}; threads: {threads}"
    )
