"""Tests that stand for all others under the instruction sets that this process has not chosen, each in its own process.

`make test-paths` runs all tests that reach the CPU kernels under each of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import instruction_sets
import pytest

TESTS = Path(__file__).parent
# Blocks, rings in one process and over gloo, gradients, and what is promised of bits, errors and unusual numbers.
FILES = ("accuracy", "attention_ranks", "attention_virtual", "autograd", "bitwise", "blocks", "nonfinite", "odd_input")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif("RINGATTN_CPU" in os.environ, reason="RINGATTN_CPU asks for one instruction set")
@pytest.mark.parametrize("name", instruction_sets.each())
def test_under(name: str) -> None:
    if name == instruction_sets.of_this_machine()[-1]:
        pytest.skip("the other tests run under it")
    files = [TESTS / f"test_{file}.py" for file in FILES]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=TESTS.parent,
        env=instruction_sets.environment(name),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, f"under RINGATTN_CPU={name}:\n{done.stdout[-10000:]}"
