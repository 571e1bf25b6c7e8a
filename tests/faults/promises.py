"""What must hold after a case: each promise is one function of the case and the report of its leader.

`check` asserts all that apply. A failure shows the report, less what makes it long.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from faults.cases import LOST_RANK, Case

Report = dict[str, Any]

AT_ONCE = 0.2  # s, for the next call on a broken group
INTERRUPTED = 1.5  # s: a second, and what a busy machine adds
EARLY = 0.5  # s before the timeout at which a wait may end
BUSY = 0.3  # s of CPU time per second of waiting
BUSY_AT_MOST = 0.3  # s of CPU time on top: raising, and noise
DESTROYED = 5.0  # s
SHARED_THREADS = "ringattn_wait"
SHARED_AT_MOST = 4
STILL_WAITING = "still waiting"


def runs(case: Case, report: Report) -> dict[int, dict[str, Any]]:
    """What the pass came to on every rank that lived."""
    return report["steps"].get("run", {})


def others(case: Case, report: Report) -> dict[int, dict[str, Any]]:
    return {rank: run for rank, run in runs(case, report).items() if rank != case.victim}


def freed(case: Case, report: Report) -> dict[int, dict[str, Any]]:
    """The rank that could notice nothing before it was set free, if the case has one."""
    ranks = {case.actor} if report["cleared_at"] else set()
    return {rank: run for rank, run in runs(case, report).items() if rank in ranks}


def finished(case: Case, report: Report) -> set[int]:
    """Ranks that had all they needed when a read failed of which another rank needed the bytes."""
    return {rank for rank, run in runs(case, report).items() if case.fault == "reset" and run["error"] is None}


def seconds(case: Case, report: Report, rank: int) -> float:
    """From the fault, or from when the rank was set free, to the end of the pass on that rank."""
    begin = report["cleared_at"] if rank in freed(case, report) else report["fault_at"]
    return runs(case, report)[rank]["ended"] - begin


# --- every case ---


def every_rank_answered(case: Case, report: Report) -> None:
    assert not report["broken"], (report["broken"], report.get("stderr"))
    stacks = "\n".join(f"--- rank {rank}\n{text}" for rank, text in report["stacks"].items())
    where = list(report["steps"])[-1]
    assert not stacks, f"no answer from ranks {sorted(report['stacks'])} to {where!r}, where they stood:\n{stacks}"


def no_process_died(case: Case, report: Report) -> None:
    """But the one that was to; and those that are left end well."""
    expected = dict.fromkeys(range(case.P), 0)
    if case.fault in ("kill", "ambush", "midway"):
        expected[case.victim] = -9
    stderr = {rank: report["stderr"][rank][-2000:] for rank, code in report["exits"].items() if code != expected[rank]}
    assert report["exits"] == expected, stderr
    dead = {case.victim} if case.what.victim_ends == "dead" else set()
    assert set(runs(case, report)) == set(range(case.P)) - dead


def nothing_is_logged(case: Case, report: Report) -> None:
    """By ranks that had to wait for less than the time after which they say so."""
    if case.job != "warn":
        for rank, text in report["stderr"].items():
            assert STILL_WAITING not in text, f"rank {rank}: {text}"


def nobody_was_busy(case: Case, report: Report) -> None:
    """Ranks sleep while they wait, and when the pass has ended."""
    for rank, run in runs(case, report).items():
        waited = run["ended"] - run["started"]
        assert run["cpu"] < BUSY * waited + BUSY_AT_MOST, f"rank {rank}: {run['cpu']:.2f} s of CPU in {waited:.2f} s"
    for rank, answer in report["steps"]["recover"].items():
        assert answer["busy"] < BUSY, f"rank {rank} is at {answer['busy']:.0%} of a CPU after the pass"


def a_new_group_works(case: Case, report: Report) -> None:
    for rank, answer in report["steps"]["recover"].items():
        assert answer["destroy"] is None and answer["error"] is None, (rank, answer)
        assert answer["seconds"] < DESTROYED, (rank, answer)


def nothing_is_left(case: Case, report: Report) -> None:
    """No open file and no thread of a group that is gone. Threads that wait for any group may stay: one for each
    neighbour, and one that asks whether others have failed."""
    for rank, answer in report["steps"]["recover"].items():
        for moment in ("after_destroy", "after_recovery"):
            more = {what: count - answer["at_rest"].get(what, 0) for what, count in answer[moment].items()}
            more[SHARED_THREADS] = answer[moment].get(SHARED_THREADS, 0) - SHARED_AT_MOST
            if case.job == "tcp" and rank == 0:
                more["open files"] -= 2  # a pipe of its store, which torch itself forgets
            assert max(more.values()) <= 0, f"rank {rank}, {moment}: {more} more than before"


# --- passes that fail ---


def ring_error(case: Case, report: Report) -> None:
    """On all ranks but the one that failed in a way of its own."""
    done = finished(case, report)
    assert case.victim not in done
    for rank, run in runs(case, report).items():
        own = rank == case.victim and case.what.victim_ends == "raises"
        error = run["error"]
        if rank in done:
            assert run["equal"], f"rank {rank} has finished, with a wrong result"
            continue
        assert error is not None, f"rank {rank} has finished, without an error"
        if not own:
            assert error["type"] == "RingError", (rank, error)


def bounded(case: Case, report: Report) -> None:
    for rank in runs(case, report):
        bound = LOST_RANK if rank in freed(case, report) else case.bound
        took = seconds(case, report, rank)
        assert took <= bound, f"rank {rank} needed {took:.2f} s, more than {bound} s"


def not_early(case: Case, report: Report) -> None:
    """A silent rank has the timeout of the group to come back; what ends the first wait then ends the others."""
    begin = min(run["started"] for run in others(case, report).values())
    for rank, run in others(case, report).items():
        took = run["ended"] - begin
        assert took >= case.timeout - EARLY, f"rank {rank} gave up after {took:.2f} s of {case.timeout} s"


def attributes(case: Case, report: Report) -> None:
    """What an error says of itself: rank, group and call; peer and hop where there are such."""
    for rank, run in runs(case, report).items():
        error = run["error"]
        if rank in finished(case, report) or error["type"] != "RingError":
            continue
        about = {name: error[name] for name in ("rank", "peer", "group", "call", "hop")}
        assert about["rank"] == rank, (rank, about)
        assert about["group"] == report["steps"]["start"][rank]["group"], (rank, about)
        assert isinstance(about["call"], int) and about["call"] > 0, (rank, about)
        innocent = {rank} - {case.victim}
        assert about["peer"] is None or about["peer"] in set(range(case.P)) - innocent, (rank, about)
        assert about["hop"] is None or about["hop"] in range(case.P), (rank, about)


def culprit_is_named(case: Case, report: Report) -> None:
    """By all, if it has failed or is dead: those that notice tell the others. A silent rank, or one with a connection
    that failed, at least by a rank that waits for it; in a ring of two there is no other to blame."""
    done = finished(case, report)
    named = {rank: run["error"]["peer"] for rank, run in others(case, report).items() if rank not in done}
    assert case.victim in named.values() or done == set(others(case, report)), named
    if case.P == 2 or (case.ends == "lost" and case.fault != "reset"):
        assert set(named.values()) == {case.victim}, named


def hop_is_named(case: Case, report: Report) -> None:
    """None where the ranks compare their calls; the ranks that had got further were in a hop."""
    hops = {rank: run["error"]["hop"] for rank, run in others(case, report).items()}
    if case.phase in ("header", "between"):
        assert set(hops.values()) == {None}, hops
        stages = {rank: run["in"] for rank, run in others(case, report).items()}
        assert set(stages.values()) == {"forward" if case.phase == "header" else "backward"}, stages
    if case.phase in ("first", "backward"):
        assert any(isinstance(hop, int) for hop in hops.values()), hops


def interrupted(case: Case, report: Report) -> None:
    run = runs(case, report)[case.victim]
    expected = "Stopped" if case.job == "handler" else "KeyboardInterrupt"
    assert run["error"] is not None and run["error"]["type"] == expected, run
    assert run["in"] in ("forward", "backward"), run
    took = seconds(case, report, case.victim)
    assert took < INTERRUPTED, f"{took:.2f} s"


def own_error(case: Case, report: Report) -> None:
    error = runs(case, report)[case.victim]["error"]
    assert error is not None and "injected" in error["text"], error


def memory_is_left_alone(case: Case, report: Report) -> None:
    """Nothing that was in flight arrives where its buffer was."""
    for rank, answer in report["steps"]["recover"].items():
        assert answer["canaries_live"], f"rank {rank}"


def broken_stays_broken(case: Case, report: Report) -> None:
    """Each later call raises at once, with the first cause."""
    for rank, answers in report["steps"]["call_again"].items():
        first = runs(case, report)[rank]["error"]
        if rank in finished(case, report) or (case.fault, case.phase, rank) == ("raise", "between", case.victim):
            # Its own group was whole: it hears of the others in the next call.
            first = answers.pop("ring_attention")["error"]
        cause = first["text"].removeprefix("ring: ")
        if first["type"] == "KeyboardInterrupt":
            cause = "interrupt"
        for name, answer in answers.items():
            error = answer["error"]
            assert error is not None and error["type"] == "RingError", (rank, name, error)
            assert answer["seconds"] < AT_ONCE, f"{name} on rank {rank}: {answer['seconds']:.2f} s"
            assert cause.lower() in error["text"].lower(), (rank, name, cause, error["text"])


# --- the other ends ---


def refused(case: Case, report: Report) -> None:
    """One rank's error before the pass is an error on all ranks."""
    for rank, run in others(case, report).items():
        error = run["error"]
        assert error is not None and error["type"] == "RingError", (rank, error)
        assert f"rank {case.victim} refused: " in error["text"] and "injected" in error["text"], (rank, error)
        assert error["peer"] == case.victim and error["hop"] is None, (rank, error)


def interrupted_aside(case: Case, report: Report) -> None:
    assert runs(case, report)[case.victim]["interrupted"], "the main thread has not heard of it"


def same_bits(case: Case, report: Report) -> None:
    """Nothing has happened."""
    for rank, run in runs(case, report).items():
        assert run["error"] is None and run["equal"], (rank, run)


def group_goes_on(case: Case, report: Report) -> None:
    for rank, answers in report["steps"]["call_again"].items():
        assert answers["prove"]["error"] is None, (rank, answers)


Promise = Callable[[Case, Report], None]

ALWAYS: list[Promise] = [every_rank_answered, no_process_died, nothing_is_logged, nobody_was_busy]
AFTERWARDS: list[Promise] = [a_new_group_works, nothing_is_left, memory_is_left_alone]
FAILED: list[Promise] = [ring_error, bounded, attributes, broken_stays_broken]


def promises_of(case: Case) -> list[Promise]:
    found: list[Promise] = {
        "lost": [*FAILED, culprit_is_named],
        "silent": [*FAILED, culprit_is_named, not_early],
        "refused": [refused, bounded, group_goes_on],
        "well": [same_bits, group_goes_on],
    }[case.ends]
    # The bytes of which a read fails may be of any phase from then on.
    if case.ends in ("lost", "silent") and case.fault != "reset":
        found = [*found, hop_is_named]
    if case.fault == "interrupt":
        found = [*found, interrupted]
    if case.fault == "aside":
        found = [*found, interrupted_aside]
    if case.fault == "raise":
        found = [*found, own_error]
    return [*ALWAYS, *found, *AFTERWARDS]


def check(case: Case, report: Report) -> None:
    """Asserts all promises; says all that are broken."""
    broken = []
    for promise in promises_of(case):
        try:
            promise(case, report)
        except AssertionError as error:
            broken.append(f"{promise.__name__}: {error}")
            if promise is every_rank_answered:
                break
    assert not broken, "\n".join([f"{case}", *broken, *_lines(report)])


def _lines(report: Report) -> list[str]:
    """The report, a line for each step and rank."""
    lines = [f"{key}: {value}" for key, value in report.items() if key not in ("steps", "stacks", "stderr")]
    for step, answers in report.get("steps", {}).items():
        lines += [f"{step}, rank {rank}: {json.dumps(answer)}" for rank, answer in sorted(answers.items())]
    return lines
