"""The proof of the schedules is worth what it finds: schedules with one fault each, and what is said about them."""

import random
from collections.abc import Callable

import pytest
from mask_cases import MaskCase
from ring_simulation import (
    Schedule,
    ScheduleError,
    backward_schedules,
    check_backward,
    check_forward,
    forward_schedules,
    pair_counts,
)

from ringattn_ext._C import NONE, Layout, Source, Visibility

P = 6


def receive_into_the_buffer_that_is_read(steps: Schedule) -> None:
    steps[2][1].write_buffer = steps[2][1].read_buffer


def no_relay_without_work(steps: Schedule) -> None:
    """A rank that skips a step forgets to pass its block on."""
    steps[2][1].next_block = NONE


def read_a_stale_block(steps: Schedule) -> None:
    """A rank does not swap its buffers."""
    steps[1][2].read_buffer = steps[1][1].read_buffer


def work_on_a_stale_block(steps: Schedule) -> None:
    """A rank takes what it has for the block of the step before."""
    steps[2][-1].block = (steps[2][-1].block + 1) % P


def pass_on_a_stale_block(steps: Schedule) -> None:
    """A rank, and all its steps agree on that, has the block its neighbour had a step ago."""
    steps[2][1].next_block = (steps[2][1].next_block + 1) % P


def end_one_hop_early(steps: Schedule) -> None:
    for own in steps:
        own.pop()
        own[-1].next_block, own[-1].finalize = NONE, True


def one_rank_ends_early(steps: Schedule) -> None:
    steps[2].pop()


def finalize_too_early(steps: Schedule) -> None:
    steps[0][1].finalize = True


def never_finalize(steps: Schedule) -> None:
    steps[0][-1].finalize = False


def skip_visible_work(steps: Schedule) -> None:
    steps[3][2].visibility = Visibility.skip


def send_the_wrong_way(steps: Schedule) -> None:
    steps[1][1].send_to, steps[1][1].receive_from = steps[1][1].receive_from, steps[1][1].send_to


FORWARD_FAULTS = [
    (receive_into_the_buffer_that_is_read, "being sent|being received"),
    (no_relay_without_work, "sends nothing"),
    (read_a_stale_block, "sends .* which holds"),
    (work_on_a_stale_block, "works on block"),
    (pass_on_a_stale_block, "expects"),
    (end_one_hop_early, "exactly once"),
    (one_rank_ends_early, "different numbers of steps"),
    (finalize_too_early, "finalizes"),
    (never_finalize, "finalizes"),
    (skip_visible_work, "exactly once"),
    (send_the_wrong_way, "sends nothing|expects"),
]


def hop_of_the_last_gradient_missing(steps: Schedule) -> None:
    for own in steps:
        own[-1].outgoing_gradient = own[-1].incoming_gradient = NONE


def one_rank_drops_an_accumulator(steps: Schedule) -> None:
    steps[1][2].outgoing_gradient = steps[1][2].incoming_gradient = NONE


def accumulate_into_what_arrives(steps: Schedule) -> None:
    steps[2][1].local_gradient = steps[2][1].incoming_gradient


def accumulate_into_what_leaves(steps: Schedule) -> None:
    steps[2][1].local_gradient = steps[2][1].outgoing_gradient


def receive_into_what_leaves(steps: Schedule) -> None:
    steps[2][1].incoming_gradient = steps[2][1].outgoing_gradient


def own_block_instead_of_the_kept_one(steps: Schedule) -> None:
    steps[1][0].source = Source.own


def kept_block_at_the_end(steps: Schedule) -> None:
    steps[1][-1].source = Source.kept


def contribution_missing(steps: Schedule) -> None:
    steps[3][2].visibility = Visibility.skip


BACKWARD_FAULTS = [
    (receive_into_the_buffer_that_is_read, "being sent|being received"),
    (no_relay_without_work, "sends nothing|expects"),
    (read_a_stale_block, "sends .* which holds|works on block"),
    (hop_of_the_last_gradient_missing, "has the parts of"),
    (one_rank_drops_an_accumulator, "sends nothing"),
    (accumulate_into_what_arrives, "on its way"),
    (accumulate_into_what_leaves, "on its way"),
    (receive_into_what_leaves, "being sent"),
    (own_block_instead_of_the_kept_one, "sends .* which holds|works on block"),
    (kept_block_at_the_end, "works on block"),
    (contribution_missing, "has the parts of"),
]


def ring() -> tuple[Layout, MaskCase]:
    """Every rank sees a part of every block."""
    seq_len = random.randint(4 * P, 60)
    return Layout(random.choice(["zigzag", "striped"]), P, seq_len), MaskCase(seq_len, right=0)


def check_finds(prove: Callable[[], None], steps: Schedule, spoil: Callable[[Schedule], None], message: str) -> None:
    prove()
    spoil(steps)
    with pytest.raises(ScheduleError, match=message):
        prove()


@pytest.mark.parametrize(("spoil", "message"), FORWARD_FAULTS, ids=[spoil.__name__ for spoil, _ in FORWARD_FAULTS])
def test_forward(spoil: Callable[[Schedule], None], message: str) -> None:
    layout, case = ring()
    allowed = case.allowed(range(layout.seq_len), range(layout.seq_len))
    steps = forward_schedules(layout, layout, case.mask())
    check_finds(lambda: check_forward(steps, layout, layout, allowed), steps, spoil, message)


@pytest.mark.parametrize(("spoil", "message"), BACKWARD_FAULTS, ids=[spoil.__name__ for spoil, _ in BACKWARD_FAULTS])
def test_backward(spoil: Callable[[Schedule], None], message: str) -> None:
    layout, case = ring()
    counts = pair_counts(layout, layout, case.allowed(range(layout.seq_len), range(layout.seq_len)))
    ended = [own[-1].block for own in forward_schedules(layout, layout, case.mask())]
    steps = backward_schedules(layout, layout, case.mask())
    check_finds(lambda: check_backward(steps, ended, counts), steps, spoil, message)
