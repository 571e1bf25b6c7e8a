"""The instruction sets of the CPU kernels, one of which a process chooses: RINGATTN_CPU asks for it."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

from ringattn_ext._doctor.collect import _instruction_sets

NAMES = ("generic", "avx2", "avx512", "avx512_bf16")  # the best comes last


def of_this_machine() -> list[str]:
    """Those that a test can run under; /proc/cpuinfo knows."""
    return _instruction_sets()


def each(names: tuple[str, ...] = NAMES) -> list:
    """Parameters of a test: what the machine lacks is skipped, and a reason given."""
    lacking = set(names) - set(of_this_machine())
    return [
        pytest.param(name, marks=pytest.mark.skipif(name in lacking, reason=f"this machine has no {name}"))
        for name in names
    ]


def environment(name: str) -> Mapping[str, str]:
    return os.environ | {"RINGATTN_CPU": name}


if __name__ == "__main__":
    print(*of_this_machine())
