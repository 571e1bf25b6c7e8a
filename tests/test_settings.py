"""What environment variables say, read once by each process: RINGATTN_CHECK and RINGATTN_WARN_SEC."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from ranks import RankPool
from small_call import attempt, prove, small_call

import ringattn_ext as ra

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def ranks() -> Iterator[RankPool]:
    """Processes that have not read their environment yet."""
    pool = RankPool(3)
    yield pool
    pool.close()


def call(**changes: Any) -> tuple[str, str]:
    return attempt(ra.ring_attention, **small_call(dist.get_rank(), dist.get_world_size(), **changes))


def calls_with(values: list[str], name: str, count: int) -> list[tuple[str, str]]:
    os.environ[name] = values[dist.get_rank()]
    return [call() for _ in range(count)]


def odd_last(ranks: RankPool, usual: str, odd: str) -> list[str]:
    return [usual] * (ranks.world_size - 1) + [odd]


@pytest.mark.parametrize("odd", ["off", "always"])
def test_ranks_that_differ_about_checks(ranks: RankPool, odd: str) -> None:
    """They say so at every call, since none may go ahead until they agree."""
    answers = ranks.run(calls_with, odd_last(ranks, "auto", odd), "RINGATTN_CHECK", 3)
    expected = ("RingError", f"ring: ranks disagree on RINGATTN_CHECK: ranks 0 and 1 have auto, rank 2 has {odd}")
    assert answers == [[expected] * 3] * ranks.world_size


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("RINGATTN_CHECK", "never", "auto, always or off"),
        ("RINGATTN_WARN_SEC", "soon", "a number of seconds above 0"),
        ("RINGATTN_WARN_SEC", "-1", "a number of seconds above 0"),
        ("RINGATTN_WARN_SEC", "nan", "a number of seconds above 0"),
    ],
)
def test_bad_value_on_one_rank(ranks: RankPool, name: str, value: str, expected: str) -> None:
    answers = ranks.run(calls_with, odd_last(ranks, "", value), name, 2)
    text = f"{name}: expected {expected}, got '{value}'"
    last = ranks.world_size - 1
    assert answers[last] == [("ValueError", text)] * 2
    assert answers[:last] == [[("RingError", f"ring: rank {last} refused: {text}")] * 2] * last


def calls_that_differ(check: str) -> list[tuple[str, str]]:
    """The first and a later call in which ranks differ about the scale, with an agreed call between them."""
    os.environ["RINGATTN_CHECK"] = check
    scale = 0.5 + dist.get_rank()
    answers = [call(scale=scale)]
    prove()
    answers.append(call(scale=scale))
    if check != "off":
        prove()
    return answers


@pytest.mark.parametrize("check", ["auto", "always"])
def test_every_call_on_the_cpu_is_compared(ranks: RankPool, check: str) -> None:
    for first, later in ranks.run(calls_that_differ, check):
        assert first[0] == "RingError" and "disagree on scale" in first[1]
        assert first == later


def test_off_compares_calls_until_ranks_agree_on_one(ranks: RankPool) -> None:
    for first, later in ranks.run(calls_that_differ, "off"):
        assert first[0] == "RingError" and "disagree on scale" in first[1]
        assert later == ("", "")


def refusals_that_nobody_heard(alike: bool) -> list[tuple[str, str]]:
    """Calls that are not compared: rank 1, or all, refuse one and go on with what is right."""
    os.environ["RINGATTN_CHECK"] = "off"
    rank, P = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(timeout=timedelta(seconds=3))
    prove(group)
    answers = []
    for scale in (-1.0 if alike or rank == 1 else None, None):
        answers.append(attempt(ra.ring_attention, **small_call(rank, P, scale=scale), group=group))
    if alike:
        prove(group)
    dist.destroy_process_group(group)
    prove()
    return answers


@pytest.mark.parametrize("P", [2, 3])
def test_a_rank_that_refused_unheard_does_not_go_on(P: int) -> None:
    """Its next call would else be taken for the one that it refused."""
    pool = RankPool(P)
    try:
        alone = pool.run(refusals_that_nobody_heard, False)
        alike = pool.run(refusals_that_nobody_heard, True)
    finally:
        pool.close()
    for rank, (first, second) in enumerate(alone):
        assert first[0] == ("ValueError" if rank == 1 else "RingError"), alone
        assert second[0] == "RingError", alone
    assert [[name for name, _ in answers] for answers in alike] == [["ValueError", ""]] * P, alike


def calls_out_of_step() -> list[tuple[str, str]]:
    """Calls that are not compared and move nothing, so that rank 0 is one behind when all have something to compare."""
    os.environ["RINGATTN_CHECK"] = "off"
    rank, P = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(timeout=timedelta(seconds=20))
    prove(group)
    alone = {"layout": "contiguous", "window": (0, 0)}
    if rank > 0:
        assert attempt(ra.ring_attention, **small_call(rank, P, **alone), group=group) == ("", "")
    assert attempt(ra.ring_attention, **small_call(rank, P, scale=-1.0), group=group)[0] == "ValueError"
    answers = [attempt(ra.ring_attention, **small_call(rank, P), group=group) for _ in range(2)]
    dist.destroy_process_group(group)
    prove()
    return answers


@pytest.mark.parametrize("P", [2, 3])
def test_ranks_that_have_lost_count_cannot_go_on_uncompared(P: int) -> None:
    pool = RankPool(P)
    try:
        answers = pool.run(calls_out_of_step)
    finally:
        pool.close()
    for first, second in answers:
        assert first[0] == "RingError" and "disagree on the call number" in first[1], answers
        assert second[0] == "RingError" and "is broken" in second[1] and first[1][6:] in second[1], answers


def late_rank(late: int, seconds: float, warn_after: str) -> list[str]:
    """The warnings of this rank while one rank comes late to a call."""
    os.environ["RINGATTN_WARN_SEC"] = warn_after
    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logging.getLogger("ringattn_ext").addHandler(Keep(logging.WARNING))
    prove()
    if dist.get_rank() == late:
        time.sleep(seconds)
    prove()
    return records


def test_a_late_rank_is_named_once(ranks: RankPool) -> None:
    answers = ranks.run(late_rank, 1, 2.5, "0.5")
    assert answers[1] == []
    named = [text for rank, texts in enumerate(answers) if rank != 1 for text in texts]
    assert named, answers
    for rank, texts in enumerate(answers):
        assert len(texts) <= 1, texts
        for text in texts:
            assert f"rank {rank} of group" in text and "comparing calls" in text, text
    assert any("rank 1" in text.split(" is still waiting after ")[1] for text in named), named


def test_a_rank_that_is_not_late_is_not_named(ranks: RankPool) -> None:
    assert ranks.run(late_rank, 1, 0.7, "5") == [[]] * ranks.world_size


def test_ring_error_is_picklable() -> None:
    import pickle

    error = ra.RingError("ring: text", rank=1, peer=2, group="g", call=3, hop=0)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is ra.RingError and str(copy) == "ring: text" and isinstance(copy, RuntimeError)
    assert (copy.rank, copy.peer, copy.group, copy.call, copy.hop) == (1, 2, "g", 3, 0)
