"""Fresh random numbers in every test with the seed that brings them back beside every failure; one thread each.

One thread, because idle OpenMP threads that wait for each other on a busy machine make small tests ten times slower.
Tests that are about threads ask for them.
"""

from __future__ import annotations

import os
import random
import secrets

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("RINGATTN_HARDWARE"):  # see emulator/hardware; it builds the emulator
        from emulator.hardware.plugin import register

        register(config)


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seeds random and torch. RINGATTN_TEST_SEED=number repeats a failure."""
    number = int(os.environ.get("RINGATTN_TEST_SEED") or secrets.randbelow(2**31))
    request.node.add_report_section("setup", "seed", f"RINGATTN_TEST_SEED={number}")
    random.seed(number)
    torch.manual_seed(number)
    torch.set_num_threads(1)
    return number
