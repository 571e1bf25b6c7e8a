"""The checker on logs that are made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from .checker import NEVER, History

A, B, COMMUNICATION, OTHER = 0, 1, 2, 3  # streams
STREAMS = {i: SimpleNamespace(name=name, device=0) for i, name in enumerate(("A", "B", "communication", "other"))}


def entry(kind: str, stream: int = -1, number: int = 0, **fields: Any) -> SimpleNamespace:
    whole = {"name": "", "thread": 0, "streams": [], "accesses": [], "messages": []} | fields
    return SimpleNamespace(kind=kind, stream=stream, number=number, **whole)


def access(first: int, last: int, writes: bool) -> SimpleNamespace:
    return SimpleNamespace(name="x", writes=writes, ranges=[(first, last)])


def write(stream: int, first: int = 0, last: int = 8, **fields: Any) -> SimpleNamespace:
    return entry("operation", stream, name="write", accesses=[access(first, last, True)], **fields)


def read(stream: int, first: int = 0, last: int = 8, **fields: Any) -> SimpleNamespace:
    return entry("operation", stream, name="read", accesses=[access(first, last, False)], **fields)


def wait(stream: int, other: int, number: int) -> list[SimpleNamespace]:
    return [entry("record", other, number), entry("block", stream, number)]


def races(*entries: SimpleNamespace) -> int:
    return len(History(entries, STREAMS).problems)


def test_one_stream_is_in_order() -> None:
    assert races(write(A), read(A), write(A)) == 0


def test_two_streams_are_not() -> None:
    assert races(write(A), read(B)) == 1
    assert races(read(A), write(B)) == 1
    assert races(write(A), write(B)) == 1
    assert races(read(A), read(B)) == 0
    assert races(write(A, 0, 8), write(B, 8, 16)) == 0
    assert races(write(A, 0, 9), write(B, 8, 16)) == 1


def test_an_event_orders_what_was_enqueued_before_its_record() -> None:
    assert races(write(A), *wait(B, A, 0), read(B)) == 0
    assert races(entry("record", A, 0), write(A), entry("block", B, 0), read(B)) == 1
    assert races(write(A), *wait(B, A, 0), write(A), read(B)) == 1
    assert races(write(A), *wait(B, A, 0), *wait(OTHER, B, 1), read(OTHER)) == 0  # by way of B
    assert races(write(A), entry("record", A, 0), read(B), entry("block", B, 0)) == 1


def test_a_reader_that_is_not_the_last_one() -> None:
    assert races(read(A), read(B), *wait(OTHER, B, 0), write(OTHER)) == 1
    assert races(read(A), read(B), *wait(OTHER, B, 0), *wait(OTHER, A, 1), write(OTHER)) == 0


def test_waiting_for_nothing() -> None:
    assert races(entry("block", B, NEVER)) == 1


def test_the_host_orders_what_its_own_thread_enqueues() -> None:
    over = entry("host_wait", streams=[A])
    assert races(write(A), over, read(B)) == 0
    assert races(write(A), over, read(B, thread=1)) == 1
    assert races(over, write(A), read(B)) == 1


def test_memory_belongs_to_the_stream_that_allocated_it() -> None:
    new = entry("allocate", A, accesses=[access(0, 8, True)])
    gone = entry("free", A, accesses=[access(0, 8, True)])
    assert races(new, write(A), gone, new, write(A)) == 0
    assert races(new, write(B)) == 1
    assert races(new, *wait(B, A, 0), write(B)) == 0
    assert races(new, *wait(B, A, 0), write(B), gone) == 1
    assert races(new, *wait(B, A, 0), write(B), *wait(A, B, 1), gone) == 0
    recorded = entry("free", A, accesses=[access(0, 8, True)], streams=[B])
    assert races(new, *wait(B, A, 0), write(B), recorded) == 0
    assert races(new, *wait(B, A, 0), write(B), recorded, *wait(OTHER, A, 1), write(OTHER)) == 1


def message(sends: bool, source: int, target: int, where: int, place: int = 0) -> SimpleNamespace:
    return SimpleNamespace(sends=sends, group="g", source=source, target=target, place=place, access=where)


def exchange(stream: int, *parts: tuple[SimpleNamespace, SimpleNamespace]) -> SimpleNamespace:
    messages, accesses = zip(*parts, strict=True)
    return entry("operation", stream, name="exchange", messages=list(messages), accesses=list(accesses))


def test_messages_of_an_exchange_run_side_by_side() -> None:
    def swap(to: int) -> SimpleNamespace:
        sent, received = (
            (message(True, 0, 0, 0), access(0, 8, False)),
            (message(False, 0, 0, 1), access(to, to + 8, True)),
        )
        return exchange(COMMUNICATION, sent, received)

    assert races(swap(8)) == 0
    assert races(swap(4)) == 1
    assert races(swap(8), write(A, 16, 24)) == 0
    assert races(swap(8), read(A)) == 0
    assert races(swap(8), write(A)) == 1
    assert races(swap(8), *wait(A, COMMUNICATION, 0), write(A)) == 0


def test_a_message_comes_after_the_begin_of_its_sending_alone() -> None:
    """Rank 0 sends on COMMUNICATION what A wrote; rank 1 receives on OTHER, and its log may come first."""
    send = exchange(COMMUNICATION, (message(True, 0, 1, 0), access(0, 8, False)))
    receive = exchange(OTHER, (message(False, 0, 1, 0), access(100, 108, True)))
    ready = [write(A, 50, 58), *wait(COMMUNICATION, A, 0)]
    # The receiver is after what the sender was after.
    assert races(*ready, receive, send, *wait(B, OTHER, 1), read(B, 50, 58)) == 0
    assert races(send, receive, *wait(B, OTHER, 1), write(B)) == 1  # but not after the sending itself
    assert races(receive) == 1  # nobody sends it


def test_streams_that_wait_in_a_circle() -> None:
    first = exchange(A, (message(True, 0, 1, 0), access(0, 1, False)))
    second = exchange(B, (message(True, 1, 0, 0), access(8, 9, False)))
    late = exchange(B, (message(False, 0, 1, 0), access(16, 17, True)))
    early = exchange(A, (message(False, 1, 0, 0), access(24, 25, True)))
    assert races(early, first, late, second) > 0
    assert races(first, early, second, late) == 0
