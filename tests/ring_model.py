"""Explores every order in which the ranks of a ring can run, and complains where one of them goes wrong.

ring_simulation.py plays the schedules in lock step. Here every rank goes through its program (ring_programs.py) at its
own pace, and so does every message. A message moves when both of its ends are posted; it begins and ends at two
moments, and between them the sender's buffer is being read and the receiver's is being written. The messages of a rank
leave in order and arrive in order.

In every state that can be reached:
- no buffer is written while it is sent or received, or read while it is received,
- what is read is what the schedule says, and an accumulator that arrives has the parts of all ranks it has been to.
At every end: all ranks have finished, nothing is on its way, each rank has attended once to every block it sees, and
the gradient of its block has one part of each rank that sees it.

Three kinds of order. "host": a rank is one thread, and its messages move once they are posted (gloo). "mailbox": the
receiver copies while it waits (virtual ranks in the host's memory). "streams": every call is on a stream of its own,
waiting keeps back that stream, and exchanges follow one another on one stream of copies (NCCL). The host, which only
enqueues, is left out there: to enqueue late is to run late, and how late anything runs is open already.

A compute is one moment. Nothing but its own queue holds it back, so whatever it could overlap, it can also fall into.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ring_programs import Compute, Content, Fence, Instruction, Message, Post, Program, Verdict, Wait

from ringattn_ext._C import NONE


class ModelError(AssertionError):
    pass


RUNNING, STOPPED, FAILED, REFUSED = range(4)


class Local(NamedTuple):
    """The state of a rank. A side's progress is twice the messages that are over, and one more while one is moving."""

    at: tuple[int, ...]  # of each queue: the instruction that comes next
    sent: int
    received: int
    holds: tuple[Content | None, ...]
    status: int


class View(NamedTuple):
    """What a rank can do in a state, as numbers of states; a string says what would be wrong with it."""

    moves: tuple[tuple[str, int | str], ...]
    alone: bool  # the first move may be explored without the others: see Rank.is_free
    send: int  # the rank to which the next message can begin to move, and the one from which, as far as this rank goes
    receive: int
    sending: int  # the rank to which a message is moving
    pending: tuple[int, ...]  # the ranks with whose messages a wait has still to do, in its order: sends first
    status: int


class Posted(NamedTuple):
    message: Message
    queue: int
    position: int  # it may move when the queue is behind this
    exchange: tuple[int, ...]
    others: int  # and when so many messages of the other side are over


class Rank:
    """A rank's program and its states, which have numbers. What follows from a state is worked out once."""

    def __init__(self, rank: int, program: Program, order: str, stops: bool) -> None:
        self.rank, self.order, self.stops, self.after = rank, order, stops, program.after
        calls = program.calls
        self.queues = calls if order == "streams" else [[i for call in calls for i in call]]
        self.sends: list[Posted] = []
        self.receives: list[Posted] = []
        for q, queue in enumerate(self.queues):
            for position, instruction in enumerate(queue):
                if isinstance(instruction, Post):
                    self.add(instruction, q, -1 if instruction.early else position)
        names = {buffer for queue in self.queues for i in queue for buffer in touched(i)} | set(program.before)
        self.places = {name: place for place, name in enumerate(sorted(names))}
        self.states: list[Local] = []
        self.numbers: dict[Local, int] = {}
        self.views: dict[int, View] = {}
        self.begun: dict[tuple[int, bool], int | str] = {}
        self.ended: dict[tuple[int, Any], int] = {}
        self.stopped: dict[tuple[int, int], int] = {}
        holds = tuple(program.before.get(name) for name in self.places)
        self.start = self.number(Local((0,) * len(self.queues), 0, 0, holds, RUNNING))

    def add(self, post: Post, queue: int, position: int) -> None:
        # On one stream of copies an exchange begins when the one before is over, both sides of it.
        in_order = self.order == "streams"
        others = (len(self.receives), len(self.sends)) if in_order else (0, 0)
        for messages, side, other in zip((post.sends, post.receives), (self.sends, self.receives), others, strict=True):
            side += [Posted(message, queue, position, post.exchange, other) for message in messages]

    def number(self, local: Local) -> int:
        found = self.numbers.setdefault(local, len(self.states))
        if found == len(self.states):
            self.states.append(local)
        return found

    def front(self, local: Local, side: list[Posted], progress: int, other: int) -> int:
        """The rank with which the next message of a side can begin to move."""
        if progress % 2 == 1 or progress // 2 == len(side) or local.status != RUNNING:
            return NONE
        posted = side[progress // 2]
        ready = local.at[posted.queue] > posted.position and other // 2 >= posted.others
        return posted.message.peer if ready else NONE

    def moving(self, local: Local) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The buffers that are being sent and received."""
        sending = self.sends[local.sent // 2].message.buffers if local.sent % 2 else ()
        receiving = self.receives[local.received // 2].message.buffers if local.received % 2 else ()
        return sending, receiving

    def needed(self, wait: Wait) -> tuple[int, int]:
        """How many sends and receives must be over when a wait ends."""

        def upto(side: list[Posted]) -> int:
            return max((n + 1 for n, posted in enumerate(side) if posted.exchange == wait.exchange), default=0)

        return (upto(self.sends) if wait.sends else 0, upto(self.receives) if wait.receives else 0)

    def view(self, number: int) -> View:
        found = self.views.get(number)
        if found is None:
            found = self.views[number] = self.look(self.states[number])
        return found

    def look(self, local: Local) -> View:
        moves: list[tuple[str, int | str]] = []
        alone, waits_to_receive = False, False
        pending: tuple[int, ...] = ()
        for q, queue in enumerate(self.queues):
            if local.status not in (RUNNING, FAILED) or local.at[q] == len(queue):
                continue
            instruction = queue[local.at[q]]
            if isinstance(instruction, Wait):
                sends, receives = self.needed(instruction)
                waits_to_receive |= local.received // 2 < receives
                lacking = self.sends[local.sent // 2 : sends]
                over = 0 if lacking else local.received // 2
                lacking += [
                    posted for posted in self.receives[over:receives] if posted.exchange == instruction.exchange
                ]
                if lacking:
                    pending = tuple(posted.message.peer for posted in lacking)
                    continue
            if local.status == FAILED:
                continue
            if isinstance(instruction, Fence) and any(local.at[p] < len(self.queues[p]) for p in range(q)):
                continue
            move = (f"rank {self.rank} {describe(instruction)}", self.execute(local, q, instruction))
            if not alone and self.is_free(local, q, instruction):
                moves.insert(0, move)
                alone = True
            else:
                moves.append(move)
        send = self.front(local, self.sends, local.sent, local.received)
        receive = self.front(local, self.receives, local.received, local.sent)
        if self.order == "mailbox" and not waits_to_receive:
            receive = NONE
        sending = self.sends[local.sent // 2].message.peer if local.sent % 2 and local.status == RUNNING else NONE
        return View(tuple(moves), alone, send, receive, sending, pending, local.status)

    def is_free(self, local: Local, q: int, instruction: Instruction) -> bool:
        """Does this instruction, which can run now, commute with all that can happen before it runs?

        Then every run is a reordering of one in which it comes first, with the same reads, writes and end, and the
        search may go that way alone: it is a persistent set of one. As every move takes the ring nearer to its end, no
        other move is put off for ever.

        Until it runs, its queue posts nothing new. So of this rank's memory the others can touch only the messages that
        are posted by now, and what its other queues can reach: they do not come past a fence that waits for this one.
        Posting and passing a wait touch no memory and, once possible, stay so. A verdict may end the rank, and with it
        whatever it has posted. A rank that may stop at any moment is not reordered: stopping does not commute.
        """
        if self.stops:
            return False
        if not isinstance(instruction, Compute | Verdict):
            return True
        sends = self.sends[local.sent // 2 :]
        receives = self.receives[local.received // 2 :]
        read, written = instruction.read, instruction.written
        others: list[Instruction] = []
        for p, queue in enumerate(self.queues):
            if p != q:
                reached = queue[local.at[p] :]
                fences = [n for n, other in enumerate(reached) if isinstance(other, Fence) and p > q]
                others += reached[: fences[0]] if fences else reached
        posts = {other.exchange for other in others if isinstance(other, Post)}

        def can_move(posted: Posted) -> bool:
            return local.at[posted.queue] > posted.position or posted.exchange in posts

        if isinstance(instruction, Verdict) and any(can_move(posted) for posted in sends + receives):
            return False
        for posted in sends:
            if can_move(posted) and written.intersection(posted.message.buffers):
                return False
        for posted in receives:
            if can_move(posted) and (read | written).intersection(posted.message.buffers):
                return False
        for other in others:
            if isinstance(other, Compute | Verdict):
                if written & (other.read | other.written) or read & other.written:
                    return False
        return True

    def execute(self, local: Local, q: int, instruction: Instruction) -> int | str:
        holds, status = list(local.holds), local.status
        if isinstance(instruction, Compute | Verdict):
            sending, receiving = self.moving(local)
            for buffer in sorted(instruction.read):
                if buffer in receiving:
                    return f"rank {self.rank} reads {buffer} while it is being received"
            for buffer in sorted(instruction.written):
                if buffer in sending + receiving:
                    how = "sent" if buffer in sending else "received"
                    return f"rank {self.rank} writes {buffer} while it is being {how}"
        if isinstance(instruction, Compute):
            for buffer, name, parts in instruction.reads:
                held = holds[self.places[buffer]]
                if held is None or held[0] != name:
                    return f"rank {self.rank} {instruction.text} and finds {say(held)} in {buffer}, not {name}"
                if parts is not None and held[1] != parts:
                    return f"rank {self.rank} {instruction.text} and finds {say(held)}, not with parts {list(parts)}"
            for buffer, how, what in instruction.effects:
                held = holds[self.places[buffer]]
                if how == "set":
                    holds[self.places[buffer]] = what
                elif how == "copy":
                    holds[self.places[buffer]] = holds[self.places[what]]
                elif held is not None:
                    source = holds[self.places[what]] if how == "sum" else (held[0], what)
                    parts = source[1] if source is not None else ()
                    holds[self.places[buffer]] = (held[0], tuple(sorted(held[1] + parts)))
        if isinstance(instruction, Verdict):
            headers = [holds[self.places[row]] for row in instruction.rows]
            for j, header in enumerate(headers):
                expected = f"header of rank {(self.rank + j) % len(headers)}"
                if header is None or header[0] != expected:
                    return f"rank {self.rank} comes to a verdict with {say(header)} instead of the {expected}"
            if any(header is not None and header[1] for header in headers):
                status = REFUSED
        at = (*local.at[:q], local.at[q] + 1, *local.at[q + 1 :])
        return self.number(local._replace(at=at, holds=tuple(holds), status=status))

    def begin(self, number: int, sends: bool) -> int | str:
        """One end of a message that begins to move."""
        if (number, sends) not in self.begun:
            self.begun[number, sends] = self.begin_now(self.states[number], sends)
        return self.begun[number, sends]

    def begin_now(self, local: Local, sends: bool) -> int | str:
        sending, receiving = self.moving(local)
        if sends:
            for buffer in self.sends[local.sent // 2].message.buffers:
                if buffer in receiving:
                    return f"rank {self.rank} sends {buffer} while it is being received"
            return self.number(local._replace(sent=local.sent + 1))
        holds = list(local.holds)
        for buffer in self.receives[local.received // 2].message.buffers:
            if buffer in sending:
                return f"rank {self.rank} receives into {buffer} while it is being sent"
            holds[self.places[buffer]] = None  # anything, until all of it is there
        return self.number(local._replace(received=local.received + 1, holds=tuple(holds)))

    def end_send(self, number: int) -> tuple[int, tuple[Content | None, ...]]:
        local = self.states[number]
        contents = tuple(local.holds[self.places[b]] for b in self.sends[local.sent // 2].message.buffers)
        if (number, None) not in self.ended:
            self.ended[number, None] = self.number(local._replace(sent=local.sent + 1))
        return self.ended[number, None], contents

    def end_receive(self, number: int, contents: tuple[Content | None, ...]) -> int:
        if (number, contents) not in self.ended:
            local = self.states[number]
            holds = list(local.holds)
            for buffer, content in zip(self.receives[local.received // 2].message.buffers, contents, strict=True):
                holds[self.places[buffer]] = content
            self.ended[number, contents] = self.number(local._replace(received=local.received + 1, holds=tuple(holds)))
        return self.ended[number, contents]

    def leave(self, number: int, status: int) -> int:
        if (number, status) not in self.stopped:
            self.stopped[number, status] = self.number(self.states[number]._replace(status=status))
        return self.stopped[number, status]

    def end(self, number: int) -> str:
        """How a rank stands when nothing can happen any more."""
        local = self.states[number]
        if local.status != RUNNING:
            return ("", "stopped", "failed", "refused")[local.status]
        for q, queue in enumerate(self.queues):
            if local.at[q] < len(queue):
                raise ModelError(f"rank {self.rank} waits for ever: it {describe(queue[local.at[q]])}")
        for side, progress, what in ((self.sends, local.sent, "send"), (self.receives, local.received, "receive")):
            if progress < 2 * len(side):
                raise ModelError(f"rank {self.rank} ends and leaves a {what} in flight: {side[progress // 2].message}")
        for buffer, expected in self.after.items():
            held = local.holds[self.places[buffer]] if buffer in self.places else None
            if held != expected:
                raise ModelError(f"rank {self.rank} ends with {say(held)} in {buffer}, not {say(expected)}")
        return "finished"


def touched(instruction: Instruction) -> Iterator[str]:
    if isinstance(instruction, Compute | Verdict):
        yield from instruction.read | instruction.written
    if isinstance(instruction, Post):
        for message in instruction.sends + instruction.receives:
            yield from message.buffers


def describe(instruction: Instruction) -> str:
    if isinstance(instruction, Compute):
        return instruction.text
    if isinstance(instruction, Post | Wait):
        return f"{'posts' if isinstance(instruction, Post) else 'waits for'} exchange {instruction.exchange}"
    return "waits for the call before" if isinstance(instruction, Fence) else "comes to a verdict"


def say(content: Content | None) -> str:
    return "nothing" if content is None else f"{content[0]} {list(content[1])}" if content[1] else content[0]


State = tuple[int, ...]  # of each rank


@dataclass
class Report:
    states: int
    ends: list[tuple[str, ...]]  # of all states in which nothing can happen any more, how the ranks stand
    reduced: bool


def check_states(report: Report, P: int, hops: int) -> None:
    """No test may pass because little was looked at: there are far more states than ranks in step go through."""
    print(f"{report.states} states, {len(report.ends)} of them ends")
    assert report.states >= max(2**P, hops * (2 if report.reduced else P) ** P), report.states


def explore(
    ranks: Sequence[Program],
    order: str = "host",
    *,
    reduced: bool = False,
    stopping: int | None = None,
    closes: str = "all",
) -> Report:
    """Visits all states. Raises ModelError with a shortest run to the first that is wrong.

    reduced: leaves out reorderings of what commutes (Rank.is_free).
    stopping: a rank that may stop for ever at any moment. Then the messages from it and to it fail, and a rank that
    comes to wait for one gives up. What it closes fails for others: the connections with "all" ranks, with those of the
    messages still "pending", or "none".
    """
    tables = [Rank(rank, program, order, rank == stopping) for rank, program in enumerate(ranks)]
    start = tuple(table.start for table in tables)
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    waiting = deque([start])
    ends = []

    def history(state: State, last: str) -> str:
        lines = [last]
        while (step := came_from[state]) is not None:
            state, text = step
            lines.append(text)
        return "\n  ".join(reversed(lines))

    while waiting:
        state = waiting.popleft()
        ways = 0
        for text, after in successors(tables, state, reduced, stopping, closes):
            ways += 1
            if isinstance(after, str):
                raise ModelError(f"{after}\n  {history(state, text)}")
            if after not in came_from:
                came_from[after] = (state, text)
                waiting.append(after)
        if ways == 0:
            try:
                ends.append(tuple(table.end(number) for table, number in zip(tables, state, strict=True)))
            except ModelError as error:
                raise ModelError(f"{error}\n  {history(state, 'and nothing can happen any more')}") from None
    return Report(len(came_from), ends, reduced)


def successors(
    tables: list[Rank], state: State, reduced: bool, stopping: int | None, closes: str
) -> Iterator[tuple[str, State | str]]:
    views = [table.view(number) for table, number in zip(tables, state, strict=True)]

    def with_rank(i: int, number: int | str) -> State | str:
        return number if isinstance(number, str) else (*state[:i], number, *state[i + 1 :])

    def with_both(i: int, sender: int | str, j: int, receiver: int | str) -> State | str:
        if isinstance(sender, str) or isinstance(receiver, str):
            return sender if isinstance(sender, str) else str(receiver)
        after = list(state)
        after[i], after[j] = sender, receiver
        return tuple(after)

    if reduced:
        for i, view in enumerate(views):
            if view.alone:
                yield view.moves[0][0], with_rank(i, view.moves[0][1])
                return

    for i, view in enumerate(views):
        for text, number in view.moves:
            yield text, with_rank(i, number)
        j = view.send
        if j != NONE and views[j].receive == i:
            yield (
                f"from rank {i} to rank {j}: begins",
                with_both(i, tables[i].begin(state[i], True), j, tables[j].begin(state[j], False)),
            )
        j = view.sending
        if j != NONE and views[j].status == RUNNING:
            sender, contents = tables[i].end_send(state[i])
            yield f"from rank {i} to rank {j}: ends", with_both(i, sender, j, tables[j].end_receive(state[j], contents))

    if stopping is not None:

        def is_closed(i: int, j: int) -> bool:
            other = views[j]
            if other.status == FAILED:
                return closes == "all" or (closes == "pending" and i in other.pending)
            return other.status == STOPPED

        for i, view in enumerate(views):
            if view.status == RUNNING and view.pending and is_closed(i, view.pending[0]):
                yield f"rank {i} fails", with_rank(i, tables[i].leave(state[i], FAILED))
        view = views[stopping]
        if view.status == RUNNING and (view.moves or view.pending):
            yield f"rank {stopping} stops", with_rank(stopping, tables[stopping].leave(state[stopping], STOPPED))
