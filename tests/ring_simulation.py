"""Plays the schedules of all ranks with symbolic buffers, message by message, and complains where they do not fit.

A block is the number of its owner; a gradient accumulator is its block and the multiset of the ranks whose parts it
holds. What is being received holds nothing until the exchange is over, and may not be touched; nor may what is being
sent be written.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from mask_cases import owners

from ringattn_ext._C import (
    NONE,
    OWN_TENSORS,
    Layout,
    Mask,
    Source,
    Visibility,
    backward_schedule,
    forward_schedule,
)

Buffer = tuple[str, int]  # ("block" or "gradient", number)
Schedule = list[list[SimpleNamespace]]  # [rank][step]


class ScheduleError(AssertionError):
    pass


def check(condition: object, text: str) -> None:
    if not condition:
        raise ScheduleError(text)


def schedules(make: Any, queries: Layout, keys: Layout, mask: Mask) -> Schedule:
    """The steps of all ranks as plain records, which a test may spoil."""

    def record(step: Any) -> SimpleNamespace:
        return SimpleNamespace(**{name: getattr(step, name) for name in dir(step) if not name.startswith("_")})

    return [[record(step) for step in make(queries, keys, mask, rank)] for rank in range(queries.world_size)]


def forward_schedules(queries: Layout, keys: Layout, mask: Mask) -> Schedule:
    return schedules(forward_schedule, queries, keys, mask)


def backward_schedules(queries: Layout, keys: Layout, mask: Mask) -> Schedule:
    return schedules(backward_schedule, queries, keys, mask)


@dataclass
class Seat:
    """A rank: what its buffers hold, and what the messages of the step under way do with them."""

    rank: int
    holds: dict[Buffer, Any] = field(default_factory=dict)
    sends: list[tuple[int, Buffer, Any]] = field(default_factory=list)  # to, from where, what
    receives: list[tuple[int, Buffer, Any]] = field(default_factory=list)  # from, into where, what is expected

    def send(self, to: int, buffer: Buffer, what: Any) -> None:
        held = self.holds.get(buffer)
        check(held is not None and held[0] == what, f"rank {self.rank} sends {what} from {buffer}, which holds {held}")
        self.sends.append((to, buffer, held))

    def receive(self, source: int, buffer: Buffer, what: Any) -> None:
        self.receives.append((source, buffer, what))

    def begin(self) -> None:
        """The messages of this step are all posted: from here to the end of the exchange they are on their way."""
        targets = [buffer for _, buffer, _ in self.receives]
        check(len(set(targets)) == len(targets), f"rank {self.rank} receives twice into one of {targets}")
        for _, buffer, _ in self.sends:
            check(buffer not in targets, f"rank {self.rank} receives into {buffer}, which is being sent")
        for buffer in targets:
            self.holds.pop(buffer, None)

    def read(self, buffer: Buffer) -> Any:
        being_received = buffer in [target for _, target, _ in self.receives]
        check(not being_received, f"rank {self.rank} reads {buffer}, which is being received")
        return self.holds.get(buffer)

    def write(self, buffer: Buffer, content: Any) -> None:
        busy = buffer in [b for _, b, _ in self.sends + self.receives]
        check(not busy, f"rank {self.rank} writes {buffer}, which is on its way")
        self.holds[buffer] = content


def complete(seats: list[Seat]) -> None:
    """Delivers the messages, those of a pair of ranks in the order in which they were posted."""
    on_the_way: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for seat in seats:
        for to, _, content in seat.sends:
            on_the_way[seat.rank, to].append(content)
    for seat in seats:
        for source, buffer, what in seat.receives:
            queue = on_the_way[source, seat.rank]
            check(queue, f"rank {seat.rank} waits for {what} from rank {source}, which sends nothing")
            content = queue.pop(0)
            check(content[0] == what, f"rank {seat.rank} expects {what} and receives {content[0]}")
            seat.holds[buffer] = content
    for (source, to), queue in on_the_way.items():
        check(not queue, f"rank {source} sends {queue}, for which rank {to} does not wait")
    for seat in seats:
        seat.sends, seat.receives = [], []


def rounds(steps: Schedule) -> int:
    check(len({len(own) for own in steps}) == 1, f"ranks make different numbers of steps: {[len(s) for s in steps]}")
    return len(steps[0])


def check_block(seat: Seat, step: SimpleNamespace) -> None:
    """The compute of a step: the block it names is the one it reads."""
    held = (("block", seat.rank),) if step.read_buffer == OWN_TENSORS else seat.read(("block", step.read_buffer))
    check(held == (("block", step.block),), f"rank {seat.rank} works on block {step.block} and reads {held}")


def play_forward(steps: Schedule) -> np.ndarray:
    """[rank, block]: how often the rank comes to the block and works on it."""
    visits = np.zeros((len(steps), len(steps)), dtype=np.int64)
    seats = [Seat(rank) for rank in range(len(steps))]
    for seat, own in zip(seats, steps, strict=True):
        if own[0].read_buffer != OWN_TENSORS:
            seat.write(("block", own[0].read_buffer), (("block", seat.rank),))
    for s in range(rounds(steps)):
        now = [own[s] for own in steps]
        for seat, step in zip(seats, now, strict=True):
            if step.next_block == NONE:
                continue
            seat.send(step.send_to, ("block", step.read_buffer), ("block", step.block))
            seat.receive(step.receive_from, ("block", step.write_buffer), ("block", step.next_block))
        for seat in seats:
            seat.begin()
        for seat, step in zip(seats, now, strict=True):
            check_block(seat, step)
            visits[seat.rank, step.block] += step.visibility != Visibility.skip
            check(step.finalize == (s == len(steps[0]) - 1), f"rank {seat.rank} finalizes, or does not, at step {s}")
        complete(seats)
    return visits


def play_backward(steps: Schedule, kept: list[int]) -> list[Counter[int]]:
    """The ranks whose parts the accumulator of each block has when it is home."""
    seats = [Seat(rank) for rank in range(len(steps))]
    for t in range(rounds(steps)):
        now = [own[t] for own in steps]
        for seat, step in zip(seats, now, strict=True):
            read, local = ("block", step.read_buffer), ("gradient", step.local_gradient)
            if step.read_buffer == OWN_TENSORS:
                check(step.source == Source.own, f"rank {seat.rank} takes its own tensors for another block")
            elif step.source != Source.received:
                block = kept[seat.rank] if step.source == Source.kept else seat.rank
                seat.write(read, (("block", block),))
            if step.next_block != NONE:
                seat.send(step.send_to, read, ("block", step.block))
                seat.receive(step.receive_from, ("block", step.write_buffer), ("block", step.next_block))
            if step.outgoing_gradient != NONE:
                outgoing, incoming = ("gradient", step.outgoing_gradient), ("gradient", step.incoming_gradient)
                seat.send(step.send_to, outgoing, ("gradient of", step.outgoing_block))
                seat.receive(step.receive_from, incoming, ("gradient of", step.block))
        for seat in seats:
            seat.begin()
        for seat, step in zip(seats, now, strict=True):
            check_block(seat, step)
            part = Counter([seat.rank] if step.visibility != Visibility.skip else [])
            seat.write(("gradient", step.local_gradient), (("gradient of", step.block), part))
        complete(seats)
        for seat, step in zip(seats, now, strict=True):
            if step.incoming_gradient != NONE:
                # The accumulator that arrived is added to this step's part; the one that left is spent.
                local = ("gradient", step.local_gradient)
                name, part = seat.read(local)
                arrived_name, arrived = seat.holds.pop(("gradient", step.incoming_gradient))
                check(arrived_name == name, f"rank {seat.rank} adds {arrived_name} to {name}")
                seat.write(local, (name, part + arrived))
                check(
                    seat.holds.pop(("gradient", step.outgoing_gradient), None) is not None,
                    f"rank {seat.rank} receives into the accumulator that it sends",
                )
    home = []
    for seat, own in zip(seats, steps, strict=True):
        name, parts = seat.holds[("gradient", own[-1].local_gradient)]
        check(name == ("gradient of", seat.rank), f"rank {seat.rank} ends with the {name}")
        home.append(parts)
    return home


def pair_counts(queries: Layout, keys: Layout, allowed: np.ndarray) -> np.ndarray:
    """[rank, block]: how many (query, key) pairs the mask allows between them, by definition."""
    counts = np.zeros((queries.world_size, keys.world_size), dtype=np.int64)
    np.add.at(counts, (owners(queries)[:, None], owners(keys)[None, :]), allowed)
    return counts


def check_forward(steps: Schedule, queries: Layout, keys: Layout, allowed: np.ndarray) -> None:
    """Token by token: an allowed pair is visited exactly once. Nothing is skipped or left unmasked that must not be."""
    P, counts = len(steps), pair_counts(queries, keys, allowed)
    visits = play_forward(steps)[owners(queries)[:, None], owners(keys)[None, :]]
    check((visits[allowed] == 1).all() and visits.max(initial=0) <= 1, "an allowed pair is not visited exactly once")
    sizes = np.outer(*(np.bincount(owners(layout), minlength=P) for layout in (queries, keys)))
    for rank, own in enumerate(steps):
        for step in own:
            count, size = counts[rank, step.block], sizes[rank, step.block]
            exact = Visibility.skip if count == 0 else Visibility.full if count == size else Visibility.partial
            check(step.visibility == exact, f"rank {rank} takes {step.block} as {step.visibility}, but it is {exact}")


def check_backward(steps: Schedule, kept: list[int], counts: np.ndarray) -> None:
    """Every accumulator ends at its owner and holds one part of each rank that sees the block, and no other."""
    home = play_backward(steps, kept)
    for block, parts in enumerate(home):
        seeing = Counter(np.flatnonzero(counts[:, block]).tolist())
        check(parts == seeing, f"the gradient of block {block} has the parts of {parts}, but {seeing} see it")
