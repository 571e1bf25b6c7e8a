"""Rings of real processes under faults: no rank hangs, dies with another, or gets a wrong number.

Cases are fresh processes. Those that this session has selected run beside each other, since they mostly wait; a test
waits for its own. RINGATTN_FAULTS=full runs all combinations instead of enough for all pairs (make test-faults).

What a machine lacks is skipped; with CI_FAULTS=1 it fails if a package would help.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from faults import inject, links
from faults.cases import FAULTS, MATRICES, PHASES, SIZES, Case, matrix
from faults.pairwise import all_pairs, covering_rows, pairs_of
from faults.promises import SHARED_AT_MOST, SHARED_THREADS, STILL_WAITING, check, runs, seconds
from faults.rank import HELD, held_rank
from faults.runner import Runner

import setup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FULL = os.environ.get("RINGATTN_FAULTS") == "full"
SKIPPED_MEANS_FAILED = os.environ.get("CI_FAULTS") == "1"
AT_A_TIME = 4

ENVIRONMENTS: dict[str, dict[str, str]] = {"": {}, "warn": {"RINGATTN_WARN_SEC": "1"}}  # by job

Outcome = Callable[[Case], dict[str, Any]]


def _environment_of(case: Case) -> str:
    return case.job if case.job in ENVIRONMENTS else ""


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
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    asking = [item for item in items if item.module is request.module and "outcome" in item.fixturenames]
    cases = [item.callspec.params["case"] for item in asking]
    library = inject.build(setup.ROOT / "build" / "faults")
    runners = {job: Runner(library, **ENVIRONMENTS[job]) for job in {_environment_of(case) for case in cases}}
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        futures: dict[Case, Future] = {
            case: pool.submit(runners[_environment_of(case)].run, case)
            for case in dict.fromkeys(cases)
            if not missing(case.what.needs)[0]
        }
        yield lambda case: futures[case].result()
        pool.shutdown(cancel_futures=True)
    for runner in runners.values():
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


@pytest.mark.parametrize("need", ["namespaces", "strace"])
def test_what_is_missing_is_named(need: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda program: None)
    reason, can_be_installed = links.what_is_missing(need)
    assert "was not found; on Debian: apt-get install " in reason and can_be_installed


def test_every_fault_runs() -> None:
    everything = {name for name, fault in FAULTS.items() if fault.action}
    assert {case.fault for parameters in MATRICES for case in matrix(parameters)} == everything - {"midway"}


@each([Case("midway", phase, P, P // 2, SIZES[-1]) for phase in ("first", "backward") for P in (2, 3, 4)])
def test_killed_with_half_a_message_on_its_way(case: Case, outcome: Outcome) -> None:
    """gloo tells of a lost connection whoever waits on it, but not who waits for a message that has begun to move."""
    require(case.what.needs)
    check(case, outcome(case))


AMBUSHES = 20 if FULL else 1


@each([Case("ambush", str(i), P, P - 1 - i % P, block) for i in range(AMBUSHES) for P in (2, 3, 4) for block in SIZES])
def test_killed_at_any_time(case: Case, outcome: Outcome) -> None:
    check(case, outcome(case))


# --- groups of another age, ranks that are busy elsewhere, a store that dies with its rank ---


@each(
    [
        Case(fault, phase, P, 1, job="fresh")
        for fault in ("kill", "stop", "raise")
        for phase in ("header", "first", "backward")
        for P in (3, 4)
    ]
)
def test_first_call_of_a_group(case: Case, outcome: Outcome) -> None:
    check(case, outcome(case))


@each(
    [Case("kill", phase, 4, 1, job=job) for phase in ("header", "first", "backward") for job in ("held", "fresh_held")]
)
def test_killed_behind_a_rank_that_is_busy(case: Case, outcome: Outcome) -> None:
    """Others need not wait for the busy one to notice."""
    report = outcome(case)
    check(case, report)
    held = held_rank(case)
    for rank in set(runs(case, report)) - {held}:
        took = seconds(case, report, rank)
        assert took < HELD - 1.5, f"rank {rank} heard of it after {took:.2f} s, perhaps from rank {held}"


@each(
    [
        Case(fault, phase, 3, 0, job="tcp")
        for fault in ("kill", "stop", "exit")
        for phase in ("header", "first", "backward")
    ]
)
def test_rank_that_keeps_the_store(case: Case, outcome: Outcome) -> None:
    """As with env://: reports are lost with it. Ranks ask in vain once, and what torch prints then is short."""
    report = outcome(case)
    check(case, report)
    for rank in set(runs(case, report)) - {case.victim}:
        assert report["stderr"][rank].count("Exception raised from") <= 2, report["stderr"][rank]


# --- callers that a group does not have ---


@each([Case("", "", P, 1, job="forked_child") for P in (2, 3)])
def test_forked_child(case: Case, outcome: Outcome) -> None:
    """It is told so, and the group works on in the process that was forked."""
    report = outcome(case)
    check(case, report)
    child = report["steps"]["run"][case.victim]["job"]
    assert child["error"] is not None and child["error"]["type"] == "RingError", child
    assert child["seconds"] < 1.0, child


@each([Case("", "", 2, 1, job="loader_with_workers")])
def test_loader_with_workers(case: Case, outcome: Outcome) -> None:
    """Forked children that leave the group alone."""
    check(case, outcome(case))


@each([Case("", "", P, 1, job="second_thread") for P in (2, 3)])
def test_second_thread(case: Case, outcome: Outcome) -> None:
    report = outcome(case)
    check(case, report)
    second = report["steps"]["run"][case.victim]["job"]
    assert second["error"] is not None and second["error"]["type"] == "RingError", second
    assert "another thread" in second["error"]["text"] and second["seconds"] < 0.5, second


# --- users who have a handler of their own, and groups that come and break ---


@each([Case("interrupt", phase, P, 0, job="handler") for phase in ("header", "first") for P in (2, 3)])
def test_handler_of_the_user(case: Case, outcome: Outcome) -> None:
    check(case, outcome(case))


@each([Case("", "", P, 0, job="many_failures") for P in (2, 3)])
def test_many_failures(case: Case, outcome: Outcome) -> None:
    """Nothing piles up in a process whose groups break."""
    report = outcome(case)
    check(case, report)
    for rank, run in report["steps"]["run"].items():
        early, late = run["job"]["early"], run["job"]["late"]
        grown = late.pop("KiB") - early.pop("KiB")
        assert grown < 4096, f"rank {rank}: {grown} KiB more than after the first quarter"
        more = {what: count - early.get(what, 0) for what, count in late.items()}
        more[SHARED_THREADS] = late.get(SHARED_THREADS, 0) - SHARED_AT_MOST
        assert max(more.values()) <= 0, f"rank {rank}: {more} more than after the first quarter"


# --- what a wait says ---


@each([Case("slow", phase, P, 1, job="warn") for phase in ("header", "first", "backward") for P in (2, 3)])
def test_long_waits_are_logged(case: Case, outcome: Outcome) -> None:
    """Once for every wait: for whom, and in which hop."""
    report = outcome(case)
    check(case, report)
    named = set()
    for rank in set(range(case.P)) - {case.victim}:
        lines = [line for line in report["stderr"][rank].splitlines() if STILL_WAITING in line]
        assert len(lines) == 1, report["stderr"][rank]
        found = re.search(r"still waiting after .*, (.+): (?:send to|receive from) rank (\d)$", lines[0])
        assert found is not None, lines
        assert ("hop" in found[1]) == (case.phase != "header"), lines
        named.add(int(found[2]))
    assert case.victim in named and (case.P > 2 or len(named) == 1), report["stderr"]
    assert STILL_WAITING not in report["stderr"][case.victim]
