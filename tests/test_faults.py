"""Rings of real processes under faults: no rank hangs, dies with another, or gets a wrong number.

Cases are fresh processes. Those that this session has selected run beside each other, since they mostly wait; a test
waits for its own. RINGATTN_FAULTS=full runs all combinations instead of enough for all pairs (make test-faults).

What a machine lacks is skipped; with CI_FAULTS=1 it fails if a package would help.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from faults import inject, links
from faults.cases import FAULTS, MATRICES, PHASES, SIZES, Case, matrix
from faults.pairwise import all_pairs, covering_rows, pairs_of
from faults.promises import check
from faults.runner import Runner

import setup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FULL = os.environ.get("RINGATTN_FAULTS") == "full"
SKIPPED_MEANS_FAILED = os.environ.get("CI_FAULTS") == "1"
AT_A_TIME = 3

Outcome = Callable[[Case], dict[str, Any]]


@cache
def missing(need: str) -> tuple[str, bool]:
    return links.what_is_missing(need)


def require(need: str) -> None:
    reason, can_be_installed = missing(need)
    if reason:
        pytest.fail(reason) if SKIPPED_MEANS_FAILED and can_be_installed else pytest.skip(reason)


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest) -> Iterator[Outcome]:
    """The report of a case. With the first question all cases of the session are begun, in their order."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module]
    cases = [item.callspec.params["case"] for item in items if "case" in getattr(item, "callspec", None).params]
    runner = Runner(inject.build(setup.ROOT / "build" / "faults"))
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        futures: dict[Case, Future] = {
            case: pool.submit(runner.run, case) for case in dict.fromkeys(cases) if not missing(case.what.needs)[0]
        }
        yield lambda case: futures[case].result()
        pool.shutdown(cancel_futures=True)
    runner.close()


def each(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [pytest.param(case, id=str(case)) for case in cases])


# --- the rank that nobody else's end tells about: it is no neighbour of the one that dies ---


@each([Case("kill", phase, 4, 1, block) for block in SIZES for phase in PHASES])
def test_killed_far_away(case: Case, outcome: Outcome) -> None:
    check(case, outcome(case))


# --- all faults ---


@each([case for parameters in MATRICES for case in matrix(parameters, FULL)])
def test_fault(case: Case, outcome: Outcome) -> None:
    require(case.what.needs)
    check(case, outcome(case))


@pytest.mark.parametrize("parameters", MATRICES)
def test_pairs_are_covered(parameters: dict[str, Any]) -> None:
    rows = covering_rows(parameters)
    assert set().union(*map(pairs_of, rows)) == all_pairs(parameters)
    sizes = sorted(map(len, parameters.values()))
    assert sizes[-1] * sizes[-2] <= len(rows) <= 1.5 * sizes[-1] * sizes[-2]
    assert covering_rows(parameters) == rows


def test_every_fault_runs() -> None:
    assert {case.fault for parameters in MATRICES for case in matrix(parameters)} == set(FAULTS)
