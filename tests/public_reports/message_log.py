"""A process group that passes messages on to gloo and notes what this rank posts and what it waits for, in order.

A gloo message moves only once both sides have posted it, whatever its size. A ring that waits for its send before it
has posted its receive therefore never ends; one whose log says so might still end over a transport that buffers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

CPU = torch.device("cpu")
NAME = "noted"


class Note(NamedTuple):
    what: str  # "send", "receive" or "wait"
    peer: int
    tag: int
    bytes: int


class NotedWork(dist._Work):
    def __init__(self, work: dist.Work, note: Note, log: list[Note]) -> None:
        super().__init__()
        self.work, self.note, self.log = work, note, log

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self.log.append(self.note._replace(what="wait"))
        return self.work.wait(timeout) if timeout > timedelta() else self.work.wait()


class NotedGroup(dist.ProcessGroup):
    """The ranks and the backend of another group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.backend, self.place, self.log = group._get_backend(CPU), (group.rank(), group.size()), []
        self._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, self.backend)

    def rank(self) -> int:
        return self.place[0]

    def size(self) -> int:
        return self.place[1]

    def _note(self, what: str, tensors: list[Tensor], peer: int, tag: int) -> Note:
        note = Note(what, peer, tag, sum(t.nbytes for t in tensors))
        self.log.append(note)
        return note

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> NotedWork:
        note = self._note("send", tensors, peer, tag)
        return NotedWork(self.backend.send(tensors, peer, tag), note, self.log)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> NotedWork:
        note = self._note("receive", tensors, peer, tag)
        return NotedWork(self.backend.recv(tensors, peer, tag), note, self.log)


@contextmanager
def noted() -> Iterator[tuple[str, list[Note]]]:
    """The name of such a group of all ranks, and its log."""
    group: Any = NotedGroup(dist.group.WORLD)
    dist.distributed_c10d._register_process_group(NAME, group)
    try:
        yield NAME, group.log
    finally:
        dist.distributed_c10d._unregister_process_group(NAME)


def check_hops(log: list[Note]) -> None:
    """A wait follows only on exchanges that are whole: as many receives as sends are posted, then all are waited for.

    For rings in which no message is empty: every rank then receives as many as it sends.
    """
    letters = "".join(note.what[0] for note in log)
    exchanges = re.findall("[sr]+w*|w+", letters)
    for exchange in exchanges:
        sends, receives, waits = (exchange.count(letter) for letter in "srw")
        assert sends == receives > 0 and waits == sends + receives, f"{exchange} in {' '.join(exchanges)}"


def check_pairs(logs: list[list[Note]]) -> None:
    """What one rank sends to another is, message for message, what that one receives from it."""
    for a, from_a in enumerate(logs):
        for b, at_b in enumerate(logs):
            sent = [note[2:] for note in from_a if note.what == "send" and note.peer == b]
            received = [note[2:] for note in at_b if note.what == "receive" and note.peer == a]
            assert sent == received, (a, b, sent, received)
            assert a != b or not sent, f"rank {a} sends to itself"
