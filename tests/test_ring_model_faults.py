"""What the search of ring_model.py is worth: programs with one fault each, and what is said about them.

Two ranks hide much of what can go wrong. Every fault says from how many ranks on it shows, and it is tested that fewer
do not show it.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

import pytest
from ring_model import ModelError, check_states, explore
from ring_programs import Compute, Fence, Instruction, Post, Program, Ring, Verdict, Wait, programs, small_ring
from ring_simulation import Schedule

from ringattn_ext._C import NONE, Source, Visibility

# Faults in schedules.


def does_not_swap_its_buffers(steps: Schedule) -> None:
    steps[1][1].read_buffer = 1 - steps[1][1].read_buffer


def one_buffer(steps: Schedule) -> None:
    for own in steps:
        for step in own:
            step.read_buffer = 0
            step.write_buffer = 0 if step.next_block != NONE else NONE


def two_gradient_buffers(steps: Schedule) -> None:
    for own in steps:
        for t, step in enumerate(own):
            step.local_gradient = t % 2
            if step.outgoing_gradient != NONE:
                step.outgoing_gradient = step.incoming_gradient = (t + 1) % 2


def accumulates_into_what_arrives(steps: Schedule) -> None:
    steps[1][-1].local_gradient = steps[1][-1].incoming_gradient


def no_relay_without_work(steps: Schedule) -> None:
    """A rank that has nothing to compute at a step does not exchange anything either."""
    for own in steps:
        for step in own:
            if step.visibility == Visibility.skip:
                step.next_block = NONE


def no_relay_of_anything_without_work(steps: Schedule) -> None:
    for own in steps:
        for step in own:
            if step.visibility == Visibility.skip:
                step.next_block = step.outgoing_gradient = step.incoming_gradient = NONE


def one_rank_makes_a_hop_less(steps: Schedule) -> None:
    steps[1].pop()
    steps[1][-1].next_block = NONE
    steps[1][-1].finalize = True


def all_ranks_make_a_hop_less(steps: Schedule) -> None:
    for own in steps:
        own.pop()
        own[-1].next_block = NONE
        own[-1].finalize = True


def one_rank_makes_a_hop_more(steps: Schedule) -> None:
    last, before = steps[1][-1], steps[1][-2]
    last.next_block, last.write_buffer = (last.block - 1) % len(steps), 1 - last.read_buffer
    last.send_to, last.receive_from = before.send_to, before.receive_from


def last_gradients_stay(steps: Schedule) -> None:
    """The last hop of all accumulators is left out."""
    for own in steps:
        own[-1].outgoing_gradient = own[-1].incoming_gradient = NONE


def one_rank_keeps_its_last_accumulator(steps: Schedule) -> None:
    steps[1][-1].outgoing_gradient = steps[1][-1].incoming_gradient = NONE


def one_rank_turns_the_other_way(steps: Schedule) -> None:
    for step in steps[1]:
        step.send_to, step.receive_from = step.receive_from, step.send_to


def skips_what_it_sees(steps: Schedule) -> None:
    steps[1][-1].visibility = Visibility.skip


def takes_its_own_block_for_the_kept_one(steps: Schedule) -> None:
    steps[1][0].source = Source.own


# Faults in what ranks do.

Change = Callable[[Instruction], Iterable[Instruction]]


def change(ranks: Iterable[Program], how: Change) -> None:
    for program in ranks:
        program.calls = [[new for old in call for new in how(old)] for call in program.calls]


def no_wait_for_receives(ranks: list[Program]) -> None:
    change(ranks, lambda i: [i._replace(receives=False)] if isinstance(i, Wait) else [i])


def no_wait_for_sends(ranks: list[Program]) -> None:
    change(ranks, lambda i: [i._replace(sends=False)] if isinstance(i, Wait) else [i])


def no_wait_for_receives_in_backward(ranks: list[Program]) -> None:
    for program in ranks:
        program.calls[1] = [i._replace(receives=False) if isinstance(i, Wait) else i for i in program.calls[1]]


def no_wait_for_sends_in_backward(ranks: list[Program]) -> None:
    for program in ranks:
        program.calls[1] = [i._replace(sends=False) if isinstance(i, Wait) else i for i in program.calls[1]]


def no_wait(ranks: list[Program]) -> None:
    change(ranks, lambda i: [] if isinstance(i, Wait) else [i])


def receives_do_not_wait_for_the_compute(ranks: list[Program]) -> None:
    """The buffer for the next step's block is given away before this step's compute has read it."""
    for program in ranks:
        for call in program.calls:
            posts = [n for n, i in enumerate(call) if isinstance(i, Post)]
            for before, n in reversed(list(pairwise(posts))):
                post = call[n]
                assert isinstance(post, Post)
                call[n] = post._replace(receives=())
                call.insert(before + 1, post._replace(sends=()))


def exchanges_do_not_wait_for_the_stream(ranks: list[Program]) -> None:
    change(ranks, lambda i: [i._replace(early=True)] if isinstance(i, Post) else [i])


def second_exchange_does_not_wait_for_the_stream(ranks: list[Program]) -> None:
    change(ranks, lambda i: [i._replace(early=True)] if isinstance(i, Post) and i.exchange[1] > 0 else [i])


def no_fence(ranks: list[Program]) -> None:
    change(ranks, lambda i: [] if isinstance(i, Fence) else [i])


def apart(receive_first: bool) -> Change:
    """The two halves of an exchange one after the other."""

    def how(i: Instruction) -> list[Instruction]:
        if isinstance(i, Post):
            send: list[Instruction] = [i._replace(exchange=(*i.exchange, 0), receives=()), Wait((*i.exchange, 0))]
            receive: list[Instruction] = [i._replace(exchange=(*i.exchange, 1), sends=()), Wait((*i.exchange, 1))]
            return receive + send if receive_first else send + receive
        return [] if isinstance(i, Wait) else [i]

    return how


def sends_and_then_receives(ranks: list[Program]) -> None:
    change(ranks, apart(receive_first=False))


def one_rank_posts_the_gradient_first(ranks: list[Program]) -> None:
    def turned(i: Instruction) -> list[Instruction]:
        return [i._replace(sends=i.sends[::-1], receives=i.receives[::-1])] if isinstance(i, Post) else [i]

    change(ranks[1:2], turned)


def own_tensors_instead_of_received_blocks(ranks: list[Program]) -> None:
    """Backward takes what it has at hand at every step but the first."""
    for program in ranks:
        call = program.calls[1]
        works = [n for n, i in enumerate(call) if isinstance(i, Compute) and i.text.startswith("works on")]
        for n in works[1:]:
            compute = call[n]
            assert isinstance(compute, Compute)
            (_, block, parts), *others = compute.reads
            call[n] = compute._replace(reads=(("own 0", block, parts), *others))


def kept_block_is_used_in_place(ranks: list[Program]) -> None:
    """Backward takes the kept block for its first buffer, and later receives and packs into it."""

    def kept(buffer: str) -> str:
        return "kept 0" if buffer == "block 0" else buffer

    for program in ranks:
        for number, call in enumerate(program.calls[1:], start=1):
            changed: list[Instruction] = []
            for i in call:
                if isinstance(i, Post):
                    sends, receives = (
                        tuple(m._replace(buffers=tuple(map(kept, m.buffers))) for m in side)
                        for side in (i.sends, i.receives)
                    )
                    i = i._replace(sends=sends, receives=receives)
                elif isinstance(i, Compute):
                    if ("block 0", "copy", "kept 0") in i.effects:
                        continue
                    reads = tuple((kept(buffer), name, parts) for buffer, name, parts in i.reads)
                    i = i._replace(reads=reads, effects=tuple((kept(b), how, what) for b, how, what in i.effects))
                changed.append(i)
            program.calls[number] = changed


def sent_before_the_addition(ranks: list[Program]) -> None:
    """A step's accumulator is posted before what arrived has been added to it."""
    for program in ranks:
        for call in program.calls:
            sums = [n for n, i in enumerate(call) if isinstance(i, Compute) and i.text == "adds what arrived"]
            for n in reversed(sums[:-1]):
                post = next(m for m in range(n, len(call)) if isinstance(call[m], Post))
                call.insert(post, call.pop(n))


def passes_on_without_adding(ranks: list[Program]) -> None:
    """One rank adds what arrived only to the gradient of its own block."""
    call = ranks[1].calls[1]
    sums = [i for i in call if isinstance(i, Compute) and i.text == "adds what arrived"]
    ranks[1].calls[1] = [i for i in call if i not in sums[:-1]]


def sends_once_more(ranks: list[Program]) -> None:
    """What nobody receives, without waiting for it."""
    last = [i for i in ranks[1].calls[-1] if isinstance(i, Post)][-1]
    ranks[1].calls[-1].append(last._replace(exchange=(*last.exchange, 1), receives=()))


def leaves_out(text: str) -> Callable[[list[Program]], None]:
    def fault(ranks: list[Program]) -> None:
        change(ranks, lambda i: [] if isinstance(i, Compute) and i.text == text else [i])

    fault.__name__ = f"nobody_{text.replace(' ', '_')}"
    return fault


def returns_before_the_last_send_is_over(ranks: list[Program]) -> None:
    for program in ranks:
        for call in program.calls:
            last = max((n for n, i in enumerate(call) if isinstance(i, Wait)), default=None)
            if last is not None:
                wait = call[last]
                assert isinstance(wait, Wait)
                call[last] = wait._replace(sends=False)


def no_header_from_the_rank_that_refuses(ranks: list[Program]) -> None:
    ranks[1].calls, ranks[1].after = [], {}


def one_rank_ignores_the_verdict(ranks: list[Program]) -> None:
    change(ranks[:1], lambda i: [] if isinstance(i, Verdict) else [i])


def a_round_of_headers_less(ranks: list[Program]) -> None:
    last = min(i.exchange for i in ranks[0].calls[0] if isinstance(i, Post))
    change(ranks, lambda i: [] if isinstance(i, Post | Wait) and i.exchange == last else [i])


# Two faults that are one: more buffers make up for the missing wait, but not in every ring.


def a_buffer_more(steps: Schedule) -> None:
    for own in steps:
        for s, step in enumerate(own):
            step.read_buffer = s % 3
            if step.next_block != NONE:
                step.write_buffer = (s + 1) % 3


class Fault(NamedTuple):
    fault: Callable[[list[Program]], None] | None
    calls: tuple[str, ...]
    shows_from: int  # so many ranks
    message: str
    order: str = "host"
    forward: Callable[[Schedule], None] | None = None
    backward: Callable[[Schedule], None] | None = None
    layout: str = "zigzag"
    refusing: int | None = None

    @property
    def name(self) -> str:
        spoils = [spoil for spoil in (self.fault, self.forward, self.backward) if spoil is not None]
        direction = "backward" if self.backward is not None else self.calls[-1]
        return f"{'-'.join(spoil.__name__ for spoil in spoils)}-{direction}-{self.order}"

    def programs(self, ring: Ring) -> list[Program]:
        forward, backward = ring.forward(), ring.backward()
        if self.forward is not None:
            self.forward(forward)
        if self.backward is not None:
            self.backward(backward)
        refuses = self.refusing is not None
        ranks = programs(ring, self.calls, forward=forward, backward=backward, headers=refuses, refusing=self.refusing)
        if self.fault is not None:
            self.fault(ranks)
        return ranks


BOTH, TWICE = ("forward", "backward"), ("inference", "inference")
FORWARD, RETAINED = ("forward",), ("forward", "backward", "backward")

NOTHING_THERE = "(attends to|works on) .* and finds nothing in"
OTHER_THERE = r"(attends to|works on) block (?P<due>\d) and finds block (?!(?P=due))\d"
TOUCHED = "((reads|writes|sends) .* while it is being (sent|received)|receives into .* while it is being sent)"
EARLY = "reads .* while it is being received"
OVERWRITTEN = "((receives into|writes) .* while it is being sent|sends .* while it is being received)"
FOR_EVER = "waits for ever: it waits for exchange"
INCOMPLETE = "ends with (state|gradient)"

FAULTS = [
    # The order within a rank.
    Fault(no_wait_for_receives, FORWARD, 2, NOTHING_THERE),
    Fault(no_wait_for_receives, FORWARD, 2, NOTHING_THERE, "streams"),
    Fault(no_wait_for_receives_in_backward, BOTH, 2, "(works on|adds) .* and finds nothing in"),
    Fault(no_wait_for_sends, FORWARD, 3, OVERWRITTEN),
    Fault(no_wait_for_sends, FORWARD, 3, OVERWRITTEN, "mailbox"),
    Fault(no_wait_for_sends, TWICE, 2, OVERWRITTEN),
    Fault(no_wait_for_sends_in_backward, BOTH, 3, OVERWRITTEN),
    Fault(no_wait, FORWARD, 2, NOTHING_THERE, "streams"),
    Fault(receives_do_not_wait_for_the_compute, FORWARD, 3, f"({EARLY}|{OVERWRITTEN})"),
    Fault(receives_do_not_wait_for_the_compute, BOTH, 3, f"({EARLY}|{OVERWRITTEN})"),
    Fault(second_exchange_does_not_wait_for_the_stream, FORWARD, 3, EARLY, "streams"),
    Fault(exchanges_do_not_wait_for_the_stream, FORWARD, 2, OVERWRITTEN, "streams"),
    Fault(returns_before_the_last_send_is_over, TWICE, 2, OVERWRITTEN),
    Fault(no_fence, TWICE, 2, "attends to .* and finds block . of call 1 in block ., not block . of call 0", "streams"),
    # The exchange.
    Fault(sends_and_then_receives, FORWARD, 2, FOR_EVER),
    Fault(one_rank_posts_the_gradient_first, BOTH, 4, "adds what arrived and finds block"),
    Fault(None, FORWARD, 3, FOR_EVER, forward=one_rank_turns_the_other_way),
    Fault(None, BOTH, 3, FOR_EVER, backward=one_rank_turns_the_other_way),
    Fault(None, FORWARD, 3, FOR_EVER, forward=no_relay_without_work, layout="contiguous"),
    Fault(None, BOTH, 3, NOTHING_THERE, backward=no_relay_without_work, layout="contiguous"),
    Fault(
        None,
        BOTH,
        3,
        f"({NOTHING_THERE}|{OTHER_THERE})",
        backward=no_relay_of_anything_without_work,
        layout="contiguous",
    ),
    Fault(None, FORWARD, 2, FOR_EVER, forward=one_rank_makes_a_hop_less),
    Fault(None, FORWARD, 2, FOR_EVER, forward=one_rank_makes_a_hop_more),
    Fault(None, FORWARD, 2, INCOMPLETE, forward=all_ranks_make_a_hop_less),
    Fault(None, BOTH, 2, FOR_EVER, backward=one_rank_keeps_its_last_accumulator),
    Fault(None, BOTH, 2, INCOMPLETE, backward=last_gradients_stay),
    Fault(sends_once_more, FORWARD, 2, "ends and leaves a send in flight"),
    # The buffers.
    Fault(None, FORWARD, 2, OTHER_THERE, forward=does_not_swap_its_buffers),
    Fault(None, BOTH, 3, OTHER_THERE, backward=does_not_swap_its_buffers),
    Fault(None, FORWARD, 2, TOUCHED, forward=one_buffer),
    Fault(None, BOTH, 3, TOUCHED, backward=one_buffer),
    Fault(None, BOTH, 2, TOUCHED, backward=two_gradient_buffers),
    Fault(None, BOTH, 2, "writes gradient . while it is being received", backward=accumulates_into_what_arrives),
    Fault(no_wait_for_sends, FORWARD, 4, OVERWRITTEN, forward=a_buffer_more),
    Fault(kept_block_is_used_in_place, RETAINED, 3, "works on block .* in kept 0"),
    # What is computed.
    Fault(own_tensors_instead_of_received_blocks, BOTH, 3, "works on block .* in own 0"),
    Fault(None, BOTH, 2, "copies a block and finds", backward=takes_its_own_block_for_the_kept_one),
    Fault(sent_before_the_addition, BOTH, 3, "writes gradient . while it is being sent"),
    Fault(passes_on_without_adding, BOTH, 3, "adds what arrived and finds .* not with parts"),
    Fault(leaves_out("adds what arrived"), BOTH, 2, INCOMPLETE),
    Fault(leaves_out("clears its part"), BOTH, 2, "works on block .* finds nothing in gradient"),
    Fault(None, FORWARD, 2, INCOMPLETE, forward=skips_what_it_sees),
    Fault(None, BOTH, 2, INCOMPLETE, backward=skips_what_it_sees),
    # The headers.
    Fault(no_header_from_the_rank_that_refuses, FORWARD, 2, FOR_EVER, refusing=1),
    Fault(one_rank_ignores_the_verdict, FORWARD, 2, FOR_EVER, refusing=1),
    Fault(a_round_of_headers_less, FORWARD, 2, "comes to a verdict with nothing instead of the header", refusing=1),
]


@pytest.mark.parametrize("P", range(2, 5))
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faults(fault: Fault, P: int) -> None:
    """The reduced search finds what the full one finds; of four ranks it is the only one, for the time it takes."""
    ranks = fault.programs(small_ring(P, fault.layout))
    for reduced in (False, True) if P < 4 or P < fault.shows_from else (True,):
        if P >= fault.shows_from:
            with pytest.raises(ModelError, match=rf"^rank \d {fault.message}"):
                explore(ranks, fault.order, reduced=reduced)
        else:
            report = explore(ranks, fault.order, reduced=reduced)
            assert report.ends == [("finished",) * P]
            check_states(report, P, (P - 1) * len(fault.calls))


@pytest.mark.parametrize("P", range(2, 5))
def test_halves_of_an_exchange_by_turns(P: int) -> None:
    """One after the other does work where neighbours differ in the order, and even if there is one such pair."""

    def ends(receiving_first: set[int]) -> list[tuple[str, ...]]:
        ranks = programs(small_ring(P), ("forward",))
        for rank, program in enumerate(ranks):
            change([program], apart(receive_first=rank in receiving_first))
        report = explore(ranks)
        check_states(report, P, P - 1)
        return report.ends

    assert ends({rank for rank in range(P) if rank % 2 == 1}) == [("finished",) * P]
    assert ends({1}) == [("finished",) * P]
    for all_the_same in (set(), set(range(P))):
        with pytest.raises(ModelError, match=rf"^rank 0 {FOR_EVER}"):
            ends(all_the_same)
