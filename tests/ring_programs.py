"""What every rank of a ring does in a call, in order: programs for ring_model.py, made of the schedules.

They follow ring/forward.cpp, ring/backward.cpp and comm/handshake.cpp line by line: what is read and written, in which
memory, what is posted together and where it is waited for. Buffers hold symbols: a name ("block 2 of call 0") and, in
what is summed up, the parts that are in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from mask_cases import MaskCase
from ring_simulation import Schedule, backward_schedules, forward_schedules, pair_counts

from ringattn_ext._C import NONE, OWN_TENSORS, Layout, Source, Visibility

Content = tuple[str, tuple[int, ...]]  # what it is, and the parts in it


class Compute(NamedTuple):
    """Reads and then writes, without anyone else's help."""

    text: str
    reads: tuple[tuple[str, str, tuple[int, ...] | None], ...]  # buffer, what it must hold, which parts, if that counts
    effects: tuple[tuple[str, str, Any], ...]  # buffer; "set" or "add" what, or "copy" or "sum" from which buffer

    @property
    def read(self) -> set[str]:
        sources = {what for _, how, what in self.effects if how in ("copy", "sum")}
        return sources | {buffer for buffer, _, _ in self.reads}

    @property
    def written(self) -> set[str]:
        return {buffer for buffer, _, _ in self.effects}


class Message(NamedTuple):
    peer: int
    buffers: tuple[str, ...]


class Post(NamedTuple):
    exchange: tuple[int, ...]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    early: bool = False  # a fault: it does not wait for what the queue does before it


class Wait(NamedTuple):
    exchange: tuple[int, ...]
    sends: bool = True
    receives: bool = True


class Fence(NamedTuple):
    """Waits for the end of the calls before, where a call is a stream of its own (ring/workspace.h)."""


class Verdict(NamedTuple):
    """Goes on if all headers agree."""

    rows: tuple[str, ...]

    @property
    def read(self) -> set[str]:
        return set(self.rows)

    @property
    def written(self) -> set[str]:
        return set()


Instruction = Compute | Post | Wait | Fence | Verdict


@dataclass
class Program:
    """A rank: its calls, what buffers hold before the first of them, and what they must hold after the last."""

    calls: list[list[Instruction]] = field(default_factory=list)
    before: dict[str, Content] = field(default_factory=dict)
    after: dict[str, Content] = field(default_factory=dict)


@dataclass(frozen=True)
class Ring:
    layout: Layout
    case: MaskCase

    @property
    def P(self) -> int:
        return self.layout.world_size

    @cached_property
    def sees(self) -> np.ndarray:
        """[rank, block], by the definition of the mask."""
        everywhere = range(self.layout.seq_len)
        return pair_counts(self.layout, self.layout, self.case.allowed(everywhere, everywhere)) > 0

    def forward(self) -> Schedule:
        return forward_schedules(self.layout, self.layout, self.case.mask())

    def backward(self) -> Schedule:
        return backward_schedules(self.layout, self.layout, self.case.mask())

    def is_empty(self, block: int) -> bool:
        return self.layout.length(block) == 0


# What is visited, in a contiguous layout: everything, one half, one block before, two blocks before, only one's own.
MASKS = {"full": (-1, -1), "causal": (-1, 0), "near": (2, 0), "window": (5, 0), "itself": (0, 0)}


def small_ring(P: int, layout: str = "zigzag", mask: str = "causal") -> Ring:
    """Four tokens a rank. Every rank of a causal zigzag ring sees a part of every block."""
    return Ring(Layout(layout, P, 4 * P), MaskCase(4 * P, *MASKS[mask]))


def exchange(
    ring: Ring, number: tuple[int, ...], sends: list[tuple[int, str, int]], receives: list[tuple[int, str, int]]
) -> Post:
    """Of (peer, buffer, block). Empty messages are not sent."""
    there = [[Message(peer, (b,)) for peer, b, block in side if not ring.is_empty(block)] for side in (sends, receives)]
    return Post(number, tuple(there[0]), tuple(there[1]))


def handshake(P: int, rank: int, call: int) -> list[Instruction]:
    """As in comm/handshake.cpp: row j gets the header of rank + j."""
    rows = tuple(f"row {j} of call {call}" for j in range(P))
    instructions: list[Instruction] = []
    known = 1
    while known < P:
        more, number = min(known, P - known), (call, -known)
        sends = Message((rank - known) % P, rows[:more])
        receives = Message((rank + known) % P, rows[known : known + more])
        instructions += [Post(number, (sends,), (receives,)), Wait(number)]
        known *= 2
    return [*instructions, Verdict(rows)]


def forward_call(ring: Ring, steps: list[SimpleNamespace], rank: int, call: int, keeps: bool) -> list[Instruction]:
    """The loop of ring/forward.cpp, in the buffers that it allocates."""
    turns = len(steps) > 1
    last = steps[-1].read_buffer if turns else 0
    attended = f"state of call {call}"

    def memory(buffer: int) -> str:
        if buffer == OWN_TENSORS:
            return f"own {call}"
        if buffer == last:  # the block in it leaves the pass
            return f"kept {call}" if keeps else "block 1"
        return "block 0" if buffer == 1 - last else f"block {buffer}"

    def name(block: int) -> str:
        return f"block {block} of call {call}"

    instructions: list[Instruction] = []
    if steps[0].read_buffer != OWN_TENSORS:
        packs = ((memory(steps[0].read_buffer), "copy", f"own {call}"),)
        instructions.append(Compute("packs its block", (), packs))
    loaded = False
    for s, step in enumerate(steps):
        if step.next_block != NONE:
            sends = [(step.send_to, memory(step.read_buffer), step.block)]
            receives = [(step.receive_from, memory(step.write_buffer), step.next_block)]
            instructions.append(exchange(ring, (call, s), sends, receives))
        visible = step.visibility != Visibility.skip
        if visible or step.finalize:
            state = (("queries", attended, None),) if loaded else ()
            block = ((memory(step.read_buffer), name(step.block), None),) if visible else ()
            part = (step.block,) if visible else ()
            absorb = ("queries", "add", part) if loaded else ("queries", "set", (attended, part))
            out = ((f"out {call}", "copy", "queries"),) if step.finalize else ()
            instructions.append(Compute(f"attends to block {step.block}", state + block, (absorb, *out)))
            loaded = True
        if step.next_block != NONE:
            instructions.append(Wait((call, s)))
    if keeps and turns:
        instructions.append(Compute("clears the rest of what it keeps", (), ((memory(last), "add", ()),)))
    return instructions


def backward_call(
    ring: Ring, steps: list[SimpleNamespace], rank: int, call: int, forward: int, accumulators: bool
) -> list[Instruction]:
    """The loop of ring/backward.cpp. Without accumulators: no gradient of keys and values is wanted."""
    P = ring.P

    def block_buffer(number: int) -> str:
        return f"own {forward}" if number == OWN_TENSORS else f"block {number}"

    def gradient_of(block: int) -> str:
        return f"gradient of block {block} in call {call}"

    of_queries = f"gradient of queries in call {call}"
    instructions: list[Instruction] = [
        Compute("clears the gradient of its queries", (), (("queries", "set", (of_queries, ())),))
    ]
    for t, step in enumerate(steps):
        read, block = block_buffer(step.read_buffer), f"block {step.block} of call {forward}"
        if step.read_buffer != OWN_TENSORS and step.source != Source.received:
            source = f"kept {forward}" if step.source == Source.kept else f"own {forward}"
            if not ring.is_empty(step.block):
                instructions.append(Compute("copies a block", ((source, block, None),), ((read, "copy", source),)))

        local = f"gradient {step.local_gradient}"
        incoming, outgoing = f"gradient {step.incoming_gradient}", f"gradient {step.outgoing_gradient}"
        travels = step.outgoing_gradient != NONE and accumulators
        sends, receives = [], []
        if step.next_block != NONE:
            sends.append((step.send_to, read, step.block))
            receives.append((step.receive_from, block_buffer(step.write_buffer), step.next_block))
        if travels:
            sends.append((step.send_to, outgoing, step.outgoing_block))
            receives.append((step.receive_from, incoming, step.block))
        if sends:
            instructions.append(exchange(ring, (call, t), sends, receives))

        if accumulators:
            clears = ((local, "set", (gradient_of(step.block), ())),)
            instructions.append(Compute("clears its part", (), clears))
        if step.visibility != Visibility.skip:
            reads = [(read, block, None), ("queries", of_queries, None)]
            adds = [("queries", "add", (step.block,))]
            if accumulators:
                reads.append((local, gradient_of(step.block), None))
                adds.append((local, "add", (rank,)))
            instructions.append(Compute(f"works on block {step.block}", tuple(reads), tuple(adds)))

        if sends:
            instructions.append(Wait((call, t)))
        if travels and not ring.is_empty(step.block):
            farther = tuple(sorted(r for r in ((rank + 1 + k) % P for k in range(t)) if ring.sees[r, step.block]))
            both = ((local, gradient_of(step.block), None), (incoming, gradient_of(step.block), farther))
            instructions.append(Compute("adds what arrived", both, ((local, "sum", incoming),)))

    if accumulators:
        local = f"gradient {steps[-1].local_gradient}"
        home = ((f"home {call}", "copy", local),)
        instructions.append(Compute("returns its gradient", ((local, gradient_of(rank), None),), home))
    of_query = ((f"grad_query {call}", "copy", "queries"),)
    instructions.append(Compute("returns the gradient of its queries", (("queries", of_queries, None),), of_query))
    return instructions


def programs(
    ring: Ring,
    calls: Sequence[str] = ("forward",),
    *,
    forward: Schedule | None = None,
    backward: Schedule | None = None,
    accumulators: bool = True,
    headers: bool = False,
    refusing: int | None = None,
) -> list[Program]:
    """What all ranks do in calls one after the other: "forward", "inference" (nothing is kept) or "backward".

    Other schedules than the ring's own may be given. With headers, each call begins by comparing them, and one rank may
    refuse its first call.
    """
    result = []
    schedule = {
        "forward": forward or ring.forward(),
        "inference": forward or ring.forward(),
        "backward": backward or ring.backward(),
    }
    for rank in range(ring.P):
        program = Program()
        kept = NONE
        for call, kind in enumerate(calls):
            instructions: list[Instruction] = [Fence()] if call > 0 else []
            if headers:
                instructions += handshake(ring.P, rank, call)
                refuses = rank == refusing and call == 0
                program.before[f"row 0 of call {call}"] = (f"header of rank {rank}", (1,) if refuses else ())
            steps = schedule[kind][rank]
            if kind == "backward":
                instructions += backward_call(ring, steps, rank, call, kept, accumulators)
                seen = tuple(np.flatnonzero(ring.sees[rank]).tolist())
                program.after[f"grad_query {call}"] = (f"gradient of queries in call {call}", seen)
                if accumulators:
                    seeing = tuple(np.flatnonzero(ring.sees[:, rank]).tolist())
                    program.after[f"home {call}"] = (f"gradient of block {rank} in call {call}", seeing)
            else:
                instructions += forward_call(ring, steps, rank, call, kind == "forward")
                program.before[f"own {call}"] = (f"block {rank} of call {call}", ())
                seen = tuple(np.flatnonzero(ring.sees[rank]).tolist())
                program.after[f"out {call}"] = (f"state of call {call}", seen)
                kept = call
            program.calls.append(instructions)
        result.append(program)
    return result
