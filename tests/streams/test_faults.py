"""The proof of the proof: every planted fault is found in the log, whether or not it shows in the numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import LAYOUTS

import ringattn_ext as ra

from .case_runs import RingRun, small_case
from .machine import Rank, device, faults, fresh, history, native, run_ring, using
from .properties import check_pass, planned
from .worker import on_the_machine


def count(name: str, run: Callable[[], Any]) -> int:
    """How often that which a fault would spoil happens in a run without one."""
    fresh()
    run()
    assert not history().problems
    return native.occurrences(name)


def found_with(run: Callable[[], Any], **planted: int | None) -> list[str]:
    fresh()
    with faults(**planted):
        run()
    return history().problems


def full_ring(P: int, **fields: Any) -> RingRun:
    """Every rank works on every block: each exchange is under a kernel, and what it brings is read."""
    return RingRun(small_case("full", S=8 * P + 3), P, random.choice(LAYOUTS), **fields)


@pytest.mark.parametrize("P", (2, 3, 4))
@on_the_machine
def test_a_wait_for_an_exchange_is_left_out(P: int) -> None:
    one = full_ring(P)
    waits = count("work_wait", one.run)
    hops = P - 1
    assert waits == P * (hops + hops + (hops > 1))  # backward's first step has blocks to send if there is a second hop
    for nth in range(waits):
        assert found_with(one.run, work_wait=nth), f"wait {nth} of {waits}"


@on_the_machine
def test_communication_does_not_wait_for_the_buffers() -> None:
    assert found_with(full_ring(3).run, communication_wait=None)


@on_the_machine
def test_an_exchange_is_posted_after_the_kernel() -> None:
    """Right, in order, and slow: nothing runs beside anything."""
    P = 3
    one = full_ring(P)
    for nth in range(count("late_post", one.run)):
        assert not found_with(one.run, late_post=nth)
        late = []
        for rank in range(P):
            for direction in ("forward", "backward"):
                try:
                    check_pass(history(), rank, direction, planned(one.case, one.layout, P, rank, direction))
                except AssertionError as error:
                    late.append(error)
        assert len(late) == 1, (nth, late)


@pytest.mark.parametrize("P", (2, 3, 4))
@on_the_machine
def test_virtual_ranks_leave_out_a_wait_for_an_event(P: int) -> None:
    """Backward waits for more than it needs where a later wait for the same rank comes before the buffer's next use:
    its ring of two does not."""
    case = small_case("causal", S=8 * P)
    tensors = case.tensors(random.randrange(2**31))

    def run() -> None:
        inputs = [t.to(device()).requires_grad_(P == 2) for t in tensors[:3]]
        found = ra.virtual_ring_attention(*inputs, world_size=P, layout="zigzag", return_lse=True, **case.options())
        gradients = [t.detach() * 2 for t in found]  # reads the results and writes what backward reads
        if P == 2:
            torch.autograd.grad(found, inputs, gradients)

    for nth in range(count("block", run)):
        assert found_with(run, block=nth), nth
    for nth in range(count("record", run)):
        assert found_with(run, record=nth), nth


def on_two_streams(rank: Rank, call: Callable[[], None]) -> None:
    """The same call on two streams that know of each other what inputs and results need, and no more."""
    home, other = native.current_stream(rank.rank), native.pool_stream(rank.rank)
    native.wait_for(other, home)
    call()
    with using(other):
        call()
    native.wait_for(home, other)


def calls_on_two_streams(one: RingRun, after: Callable[[Rank], None] = lambda rank: None) -> Callable[[], Any]:
    def body(rank: Rank) -> None:
        tensors = one.inputs(rank)
        results = []
        on_two_streams(rank, lambda: results.append(one.attend(rank, tensors)))
        after(rank)

    return lambda: run_ring(one.P, body)


@on_the_machine
def test_a_workspace_goes_to_another_stream_without_a_wait() -> None:
    one = full_ring(2)
    run = calls_on_two_streams(one)
    waits = count("block", run)
    assert waits == one.P  # the second call's, of each rank
    for nth in range(waits):
        assert found_with(run, block=nth), nth


@on_the_machine
def test_a_workspace_is_freed_while_another_stream_uses_it() -> None:
    one = full_ring(2)
    held: list = []

    def body(rank: Rank) -> None:
        tensors = one.inputs(rank)
        held.append(one.attend(rank, tensors))
        other = native.pool_stream(rank.rank)
        native.wait_for(other, native.current_stream(rank.rank))
        with using(other):
            held.append(one.attend(rank, tensors))
        ra.release_workspace(rank.group)
        native.wait_for(native.current_stream(rank.rank), other)
        held.append(tensors)

    def run() -> None:
        held.clear()
        run_ring(one.P, body)

    assert count("record_stream", run) > 0
    assert found_with(run, record_stream=None)


@on_the_machine
def test_a_device_is_not_made_current() -> None:
    one = full_ring(2)

    def around(rank: Rank, call: Callable[[], None]) -> None:
        native.set_current_device(15)
        call()

    one.around = around
    try:
        problems = found_with(one.run, device_switch=None)
    except RuntimeError:
        problems = history().problems
    assert any("is current" in problem or "lies on device" in problem for problem in problems), problems


Edit = tuple[int, str, int]  # step, field, value

FORWARD_EDITS: list[Edit] = [
    (0, "write_buffer", 0),  # received into what is being sent and read
    (1, "write_buffer", 1),
    (1, "read_buffer", 0),  # reads and sends what is being received into
]
BACKWARD_EDITS: list[Edit] = [
    (0, "write_buffer", 0),
    (1, "local_gradient", 0),  # adds to the accumulator that is on its way
    (1, "local_gradient", 2),  # adds to the one that is being received
    (1, "incoming_gradient", 0),  # receives into what is being sent
    (2, "outgoing_gradient", 0),  # sends what is being received into
    (2, "local_gradient", 1),
    (2, "incoming_gradient", 1),
]


def spoiled_ring(P: int, forward: list[Edit], backward: list[Edit]) -> None:
    case = small_case("causal", B=1, S=8 * P, dtype=torch.bfloat16)
    one = RingRun(case, P, "zigzag")

    def body(rank: Rank) -> None:
        q, k, v, grad_out, _ = one.inputs(rank)
        ring = torch.ops.ringattn_streams

        def place(edits: list[Edit]) -> tuple:
            steps, fields, values = ([e[i] for e in edits] for i in range(3))
            return rank.group, "zigzag", True, fields, steps, values

        saved = ring.forward(q, k, v, *place(forward))
        ring.backward(grad_out, q, k, v, *saved, *place(backward))

    fresh()
    run_ring(P, body)


@on_the_machine
def test_schedules_that_use_a_buffer_too_early() -> None:
    P = 3
    spoiled_ring(P, [], [])
    assert not history().problems
    for edit in FORWARD_EDITS:
        spoiled_ring(P, [edit], [])
        assert history().races, edit
    for edit in BACKWARD_EDITS:
        spoiled_ring(P, [], [edit])
        assert history().races, edit
