"""What happened before what, from the log of the machine; and every two accesses that nothing puts in order.

A node is an operation on a stream. It comes after what was enqueued on its stream before it, after the records that its
stream waits for, and after what the host that enqueued it has waited for. Making a tensor is a node too: what another
stream does with the tensor must come after it, because until then the memory may belong to work of the first stream.
Freeing one comes after what was enqueued on its stream, and on those it was recorded on; every access must come before.
The allocator hands memory on with what the host that freed it knew to be over.

An exchange begins, then its messages run side by side, then it ends. A message that is received comes after the begin
of the exchange that sends it; a send may be over before its receiver has begun.

Order is by vector clocks (Mattern 1989). Accesses are compared in the order of the log, each with the last write and
the last reads of its bytes, as FastTrack does (Flanagan and Freund, PLDI 2009).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

NEVER = -1
Timeline = tuple[int, int]  # a stream, and 0 or the place of a message in an exchange, from 1 on


@dataclass
class Node:
    name: str
    timeline: Timeline
    after: list[int]
    index: int = 0  # on its timeline, from 1 on
    accesses: list[tuple[str, bool, Sequence[tuple[int, int]]]] = field(default_factory=list)  # name, writes, ranges
    entry: int = -1  # in the log
    is_free: bool = False


class History:
    """entries: as in native/log.h, or anything with such fields. streams: their descriptions by number."""

    def __init__(self, entries: Sequence[Any], streams: dict[int, Any]):
        self.entries, self.streams = entries, streams
        self.nodes: list[Node] = []
        self.findings: list[str] = []
        self.of_entry: dict[int, tuple[int, int]] = {}  # entry of an operation: its first node and its last
        self._ends: dict[int, list[int]] = defaultdict(list)  # stream: the nodes that the next one comes after
        self._counts: dict[Timeline, int] = defaultdict(int)
        self._read()
        self.clocks = self._order()

    def comes_before(self, first: int, second: int) -> bool:
        """Of entries that are operations: is the first one over before the second one begins?"""
        a, b = self.of_entry[first][1], self.of_entry[second][0]
        return self._before(a, self.clocks[b])

    @cached_property
    def races(self) -> list[str]:
        return list(self._races())

    @property
    def problems(self) -> list[str]:
        """All that is wrong: races, waits for nothing, complaints of the double."""
        return self.findings + self.races

    def section(self, device: int, name: str) -> list[int]:
        """The entries between the marks of Rank.section that concern a device."""
        marks = {e.name: i for i, e in enumerate(self.entries) if e.kind == "mark"}
        first, last = marks[f"{device}: begin {name}"], marks[f"{device}: end {name}"]
        return [i for i in range(first, last) if device in self._devices(self.entries[i])]

    def _devices(self, entry: Any) -> set[int]:
        numbers = [entry.stream, *entry.streams]
        return {self.streams[number].device for number in numbers if number >= 0}

    # Reading.

    def _add(self, name: str, stream: int, after: Iterable[int], place: int = 0, **fields: Any) -> int:
        timeline = (stream, place)
        self._counts[timeline] += 1
        self.nodes.append(Node(name, timeline, sorted(set(after)), self._counts[timeline], **fields))
        return len(self.nodes) - 1

    def _read(self) -> None:
        records: dict[int, list[int]] = {}
        host: dict[int, list[int]] = defaultdict(list)  # thread: what it knows to be over
        begins: dict[tuple, int] = {}  # message: the begin of the exchange that sends it
        expected: list[tuple[int, tuple]] = []
        freed: dict[int, list[int]] = {}  # where a block begins: what the host that freed it knew to be over
        for i, entry in enumerate(self.entries):
            known = [*self._ends[entry.stream], *host[entry.thread]] if entry.stream >= 0 else []
            if entry.kind == "record":
                records[entry.number] = list(self._ends[entry.stream])
            elif entry.kind == "block":
                if entry.number == NEVER:
                    self.findings.append(f"{self._stream(entry.stream)} waits for an event that was never recorded")
                else:
                    self._ends[entry.stream] = [*self._ends[entry.stream], *records[entry.number]]
            elif entry.kind == "host_wait":
                host[entry.thread] += [end for stream in entry.streams for end in self._ends[stream]]
            elif entry.kind == "complaint":
                self.findings.append(entry.name)
            elif entry.kind == "free":
                freed[entry.accesses[0].ranges[0][0]] = list(host[entry.thread])
                known += [end for stream in entry.streams for end in self._ends[stream]]
                self.nodes.append(Node("freeing", (entry.stream, -1), known, entry=i, is_free=True))
                self.nodes[-1].accesses = [(a.name, True, a.ranges) for a in entry.accesses]
            elif entry.kind in ("operation", "allocate"):
                accesses = [(a.name, a.writes, a.ranges) for a in entry.accesses]
                name = entry.name or "allocation"
                if entry.kind == "allocate":
                    known += freed.get(entry.accesses[0].ranges[0][0], [])
                if not entry.messages:
                    node = self._add(name, entry.stream, known, accesses=accesses, entry=i)
                    self._ends[entry.stream], self.of_entry[i] = [node], (node, node)
                    continue
                begin = self._add(name, entry.stream, known, entry=i)
                parts = []
                for place, message in enumerate(entry.messages):
                    access = [accesses[message.access]]
                    part = self._add(name, entry.stream, [begin], place + 1, accesses=access, entry=i)
                    key = (message.group, message.source, message.target, message.place)
                    if message.sends:
                        begins[key] = begin
                    else:
                        expected.append((part, key))
                    parts.append(part)
                end = self._add(name, entry.stream, parts, entry=i)
                self._ends[entry.stream], self.of_entry[i] = [end], (begin, end)
        aborted = any(entry.kind == "mark" and entry.name == "aborted" for entry in self.entries)
        for part, key in expected:
            if key in begins:
                self.nodes[part].after.append(begins[key])
            elif not aborted:
                self.findings.append(f"nobody sends message {key}")

    def _stream(self, number: int) -> str:
        return str(getattr(self.streams.get(number), "name", number))

    # Order.

    def _order(self) -> np.ndarray:
        """[nodes, timelines]: how far along every timeline a node is ordered after; its own index on its own."""
        self._columns = {timeline: i for i, timeline in enumerate(self._counts)}
        clocks = np.zeros((len(self.nodes), max(len(self._columns), 1)), dtype=np.int32)
        waiting = [len(set(node.after)) for node in self.nodes]
        followers: list[list[int]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            for earlier in set(node.after):
                followers[earlier].append(i)
        ready = [i for i, count in enumerate(waiting) if count == 0]
        done = 0
        while ready:
            i = ready.pop()
            done += 1
            node = self.nodes[i]
            for earlier in node.after:
                np.maximum(clocks[i], clocks[earlier], out=clocks[i])
            if not node.is_free:
                clocks[i, self._columns[node.timeline]] = node.index
            for later in followers[i]:
                waiting[later] -= 1
                if waiting[later] == 0:
                    ready.append(later)
        if done < len(self.nodes):
            self.findings.append("streams wait for each other in a circle")
        self._column = np.array([self._columns.get(node.timeline, 0) for node in self.nodes], dtype=np.int64)
        self._index = np.array([node.index for node in self.nodes], dtype=np.int64)
        return clocks

    def _before(self, node: int, clock: np.ndarray) -> bool:
        return bool(clock[self._column[node]] >= self._index[node])

    # Accesses.

    def _races(self) -> Iterable[str]:
        bounds = {bound for node in self.nodes for _, _, ranges in node.accesses for pair in ranges for bound in pair}
        edges = np.array(sorted(bounds), dtype=np.uint64)
        last_write = np.full(max(len(edges), 1), -1, dtype=np.int64)
        last_reads = np.full((len(last_write), self.clocks.shape[1]), -1, dtype=np.int64)
        reported = set()
        cells: dict[tuple, np.ndarray] = {}
        for i, node in enumerate(self.nodes):
            clock = self.clocks[i]
            for name, writes, ranges in node.accesses:
                key = tuple(ranges)
                if key not in cells:
                    pairs = np.searchsorted(edges, np.array(key, dtype=np.uint64).reshape(-1, 2))
                    cells[key] = np.concatenate([np.arange(a, b) for a, b in pairs] or [np.arange(0)])
                where = cells[key]
                earlier = [last_write[where]]
                if writes:
                    earlier.append(last_reads[where].ravel())
                for found in earlier:
                    found = np.unique(found[found >= 0])
                    for other in found[clock[self._column[found]] < self._index[found]]:
                        both = self._describe(int(other)), self._describe(i)
                        if int(other) != i and both not in reported:
                            reported.add(both)
                            yield f"{both[0]} and {both[1]} are in no order ({name})"
                if node.is_free:
                    continue
                if writes:
                    last_write[where] = i
                    last_reads[where] = -1
                else:
                    last_reads[where, self._column[i]] = i

    def _describe(self, i: int) -> str:
        node = self.nodes[i]
        names = "/".join(name for name, _, _ in node.accesses)
        return f"{node.name} of {names} on {self._stream(node.timeline[0])} (entry {node.entry})"
