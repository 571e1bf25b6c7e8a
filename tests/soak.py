"""Thousands of mixed calls on real gloo processes: results stay right, and no rank grows.

    python tests/soak.py --calls 20000 --ranks 3 --seed 1

Every rank draws the same acts from the seed: passes forward and backward, forward alone, graphs that nobody goes back
through, gathers, init, workspaces given back, disagreements, refusals, virtual ranks, groups that are made, called
three times and destroyed; now and then a rank comes late. Every result that is due is compared with dense attention,
see error_bounds.py, and the errors of wrong calls always. Between acts, after a warm-up, each rank gives workspaces
back and notes its resident memory, threads and file descriptors. What is printed for each rank:

    memory         KiB a call: Theil and Sen's slope, the median over all pairs of notes, which a few jumps do not move
    threads        without those named ringattn_wait, which belong to a pool: as many as were ever needed at once
    descriptors    as threads, they may not be more in the last note than in the first

malloc maps every larger block on its own and has one arena, so that resident is what is in use, not what fell to pieces
between calls of different sizes.

The exit status is 1 if something grew, with what; or if a result was wrong, a rank failed, or none answered for long.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import os
import random
import secrets
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from itertools import combinations
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from cases import DTYPES, LAYOUTS, MASKS, STRIDES, Case, random_case
from configurations import DATA, NORMAL, Configuration, play, play_virtual
from error_bounds import assert_near
from spoiled import REFUSED, assert_disagreement, disagree, fields_of, refuse

import ringattn_ext as ra

KIB = 1024
GROUP_TIMEOUT = timedelta(seconds=60)
SILENCE = 120.0  # s without a sign of life from a rank
NOTES = 50  # of resources, after the warm-up
WARM_UP = 0.3  # of all calls
NOISE = 2048  # KiB in all: what an allocator's pools and late pages of libraries may add
WAITING = "ringattn_wait"
LEAKS = ("memory", "threads", "descriptors")

# Weights, in a thousand acts.
ACTS = {
    "pass": 500,
    "forward": 150,
    "abandoned": 50,
    "gather": 90,
    "init": 20,
    "release": 30,
    "disagreement": 60,
    "refusal": 50,
    "virtual": 30,
    "group": 20,
}
CALLS_OF_A_GROUP = 3
LATE, LATEST = 0.02, 0.1  # of all acts; s


class Note(NamedTuple):
    """What a rank holds after some calls."""

    calls: int
    memory: int  # KiB
    threads: int
    waiting: int  # threads that wait for messages, of the pool
    descriptors: int


def slope(points: list[tuple[float, float]]) -> float:
    """Theil and Sen's: the median of the slopes of all pairs."""
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2) if x2 != x1]
    return median(slopes) if slopes else 0.0


def memory_slope(notes: list[Note]) -> float:
    return slope([(float(note.calls), float(note.memory)) for note in notes])


def what_grew(notes: list[Note], ranks: int, limit: float) -> list[str]:
    """Of one rank. limit: KiB a call."""
    first, last, grew = notes[0], notes[-1], []
    growth = memory_slope(notes)
    if growth > limit and growth * (last.calls - first.calls) > NOISE:
        grew.append(f"memory by {growth:.3f} KiB a call, from {first.memory} to {last.memory} KiB")
    for name in ("threads", "descriptors"):
        before, after = getattr(first, name), getattr(last, name)
        if after > before:
            grew.append(f"{name} from {before} to {after}")
    bound = 4 * ranks  # at most a send and a receive for each other rank, on two groups
    if last.waiting > bound:
        grew.append(f"threads named {WAITING} to {last.waiting}, more than {bound}")
    return grew


# --- a rank ---

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # malloc.h


def make_malloc_exact() -> None:
    libc = ctypes.CDLL(None)
    assert libc.mallopt(M_MMAP_THRESHOLD, 16 * KIB) and libc.mallopt(M_ARENA_MAX, 1)


def take_note(calls: int) -> Note:
    ra.release_workspace()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free is not held
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    (resident,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:")]
    waiting = names.count(WAITING)
    return Note(calls, int(resident.split()[1]), len(names) - waiting, waiting, len(os.listdir("/proc/self/fd")))


def draw_configuration(P: int) -> Configuration:
    """From random, which all ranks have seeded alike."""
    S = random.choice((0, 1, P - 1, random.randint(2, 9), random.randint(10, 60), random.randint(61, 130)))
    case: Case = replace(
        random_case(random.choice(MASKS), S=max(S, 1)),
        dtype=random.choice(DTYPES),
    )
    if S == 0:
        case = replace(case, S=0, window=None, cu_seqlens=None)
    elif random.random() < 0.1:
        case = replace(case, Skv=random.randint(0, 60), is_causal=False, window=None, cu_seqlens=None)
    odd = random.random() < 0.2
    return Configuration(
        case,
        P,
        random.choice(LAYOUTS),
        data=tuple(random.choice([d for d in DATA if d != "times 30"]) for _ in range(4)) if odd else NORMAL,
        strides=tuple(random.choice(("contiguous", *STRIDES)) for _ in range(4)),
        needs_grad=(True,) * 3 if random.random() < 0.7 else tuple(random.random() < 0.6 for _ in range(3)),
        outputs=random.choice([(True, True), (True, False), (False, True)]),
        seed=random.randrange(2**30),
    )


class Rank:
    """One process of the soak: the acts, and the counts of what it did."""

    def __init__(self, rank: int, options: argparse.Namespace) -> None:
        self.rank, self.options = rank, options
        self.calls = self.checked = 0
        self.warming_up = True
        self.acts: Counter[str] = Counter()
        self.leaked: list[Any] = []

    def run(self, connection: Connection) -> list[Note]:
        notes: list[Note] = []
        warm = int(WARM_UP * self.options.calls)
        step = max(1, (self.options.calls - warm) // NOTES)
        # What is kept for later calls, or loaded with the first of a kind, is there from the start.
        for dtype in DTYPES:
            self._pass(Configuration(Case(B=1, Hq=4, Hkv=1, S=150, D=256, dtype=dtype), self.options.ranks))
        for first, name in enumerate(2 * list(ACTS)):
            self.act(f"first {first}", name)
        self.warming_up = False
        number, told = 0, time.monotonic()
        while self.calls < self.options.calls:
            if time.monotonic() - told > 1.0:
                connection.send(("calls", self.calls))
                told = time.monotonic()
            self.act(number)
            number += 1
            if self.calls >= warm + step * len(notes):
                dist.barrier()  # nobody is in a call or has a group of its own
                notes.append(take_note(self.calls))
        return notes

    def act(self, number: object, name: str = "") -> None:
        random.seed(f"{self.options.seed} {number}")
        name = name or random.choices(list(ACTS), list(ACTS.values()))[0]
        configuration = draw_configuration(self.options.ranks)
        late, delay = random.randrange(self.options.ranks), random.uniform(0.0, LATEST)
        if random.random() < LATE and late == self.rank:
            time.sleep(delay)
        self.acts[name] += 1
        try:
            getattr(self, f"_{name}")(configuration)
        except BaseException:
            print(f"rank {self.rank}, act {number}, {name}: {configuration}", file=sys.stderr, flush=True)
            raise
        if self.rank == 0:
            self._leak()

    def _is_due(self) -> bool:
        return self.warming_up or self.calls % self.options.check == 0

    def _count(self, configuration: Configuration, found: Any, group: Any = None) -> None:
        self.calls += 1 + configuration.is_differentiated
        if self._is_due():
            self.checked += 1
            case, place = configuration.case, {"layout": configuration.layout, "group": group}
            assert_near(configuration, found, (ra.positions(case.S, **place), ra.positions(case.key_len, **place)))

    def _pass(self, configuration: Configuration, group: Any = None) -> None:
        self._count(configuration, play(configuration, group), group)

    def _forward(self, configuration: Configuration) -> None:
        configuration = replace(configuration, needs_grad=(False,) * 3)
        with torch.no_grad():
            found = play(configuration)
        self._count(configuration, found)

    def _abandoned(self, configuration: Configuration) -> None:
        self._pass(replace(configuration, needs_grad=(True,) * 3, outputs=(False, False)))

    def _gather(self, configuration: Configuration) -> None:
        S, layout = configuration.case.S, configuration.layout
        whole = torch.arange(3.0 * S).view(3, S).requires_grad_()
        again = ra.unshard(ra.shard(whole, 1, layout=layout), 1, layout=layout, seq_len=S)
        again.square().sum().backward()
        assert torch.equal(again, whole) and whole.grad is not None and torch.equal(whole.grad, 2 * whole.detach())
        self.calls += 2

    def _init(self, configuration: Configuration) -> None:
        ra.init()
        self.calls += 1

    def _release(self, configuration: Configuration) -> None:
        ra.release_workspace()
        self._pass(configuration)

    def _disagreement(self, configuration: Configuration) -> None:
        """The rest of the answers is what the other ranks check of theirs."""
        field, odd = random.choice(fields_of(configuration)), random.randrange(self.options.ranks)
        answer = disagree(configuration, field, odd)
        assert_disagreement([answer | {"rank": rank} for rank in range(self.options.ranks)], field, odd)
        assert answer["rank"] == self.rank
        self.calls += 2 if field == "backward" else 1

    def _refusal(self, configuration: Configuration) -> None:
        argument, bad = random.choice(list(REFUSED)), random.randrange(self.options.ranks)
        answer = refuse(configuration, argument, bad)
        if self.rank == bad:
            assert answer["type"] in ("ValueError", "TypeError"), answer
        else:
            assert answer["text"].startswith(f"ring: rank {bad} refused: {argument}: "), answer
            assert answer["peer"] == bad, answer
        self.calls += 1

    def _virtual(self, configuration: Configuration) -> None:
        found = play_virtual(configuration)
        if self._is_due():
            assert_near(configuration, found)

    def _group(self, configuration: Configuration) -> None:
        """A new group of all ranks, in another order every other time."""
        order = list(range(self.options.ranks))
        random.shuffle(order)
        group = dist.new_group(order, sort_ranks=False)
        for _ in range(CALLS_OF_A_GROUP):
            self._pass(draw_configuration(self.options.ranks), group)
        dist.barrier(group)
        dist.destroy_process_group(group)

    def _leak(self) -> None:
        if "memory" in self.options.leak:
            self.leaked.append(b"x" * 128 * KIB)
        if "descriptors" in self.options.leak:
            self.leaked.append(os.dup(0))
        if "threads" in self.options.leak:
            threading.Thread(target=threading.Event().wait, daemon=True).start()


def live(rank: int, options: argparse.Namespace, connection: Connection) -> None:
    """The whole life of a rank; what it has to say goes through the connection."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    gc.freeze()  # what was imported need not be looked through at every note
    try:
        store = dist.TCPStore("127.0.0.1", connection.recv(), is_master=False)
        size = options.ranks
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=GROUP_TIMEOUT)
        soaking = Rank(rank, options)
        start = time.monotonic()
        notes = soaking.run(connection)
        seconds = time.monotonic() - start
        connection.send(("done", (notes, soaking.calls, soaking.checked, soaking.acts, seconds)))
        connection.recv()  # the others are through too
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
    sys.stderr.flush()
    os._exit(0)


# --- the program ---


def soak(options: argparse.Namespace) -> int:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    make_malloc_exact()
    context = get_context("fork")  # torch is imported once
    connections, processes = [], []
    for rank in range(options.ranks):
        here, there = context.Pipe()
        process = context.Process(target=live, args=(rank, options, there), daemon=True)
        process.start()
        there.close()
        connections.append(here)
        processes.append(process)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # its memory is not a rank's
    print(f"{options.calls} calls on {options.ranks} ranks, --seed {options.seed}", flush=True)
    try:
        for connection in connections:
            connection.send(store.port)
        reports = listen(connections, [process.pid for process in processes])
        if reports is None:
            return 1
        for connection in connections:
            connection.send("leave")
        return report(reports, options)
    finally:
        for process in processes:
            process.kill()
            process.join()


def listen(connections: list[Connection], pids: list[int | None]) -> list[Any] | None:
    """What every rank reports at its end; None, with the reason printed, if one fails or is silent."""
    reports: dict[int, Any] = {}
    shown = time.monotonic()
    while len(reports) < len(connections):
        missing = {id(c): rank for rank, c in enumerate(connections) if rank not in reports}
        ready = wait([connections[rank] for rank in missing.values()], SILENCE)
        if not ready:
            print(f"ranks {sorted(missing.values())} gave no sign of life for {SILENCE:.0f} s", flush=True)
            for rank in missing.values():
                os.kill(pids[rank] or 0, signal.SIGUSR1)
                time.sleep(0.5)
            return None
        for connection in ready:
            rank = missing[id(connection)]
            try:
                kind, what = connection.recv()
            except EOFError:
                kind, what = "failed", "its process ended"
            if kind == "failed":
                print(f"rank {rank} failed: {what}", flush=True)
                return None
            if kind == "done":
                reports[rank] = what
            elif rank == 0 and time.monotonic() - shown > 30.0:
                print(f"  {what} calls", flush=True)
                shown = time.monotonic()
    return [reports[rank] for rank in range(len(connections))]


COLUMNS = f"{'rank':>4} {'calls':>7} {'checked':>7} {'seconds':>8} {'memory, KiB a call':>19} {'resident, MiB':>15}"
COLUMNS += f" {'threads':>9} {'waiting':>7} {'descriptors':>11}"


def report(reports: list[Any], options: argparse.Namespace) -> int:
    acts = reports[0][3]
    print(", ".join(f"{acts[name]} x {name}" for name in ACTS if acts[name]))
    print(COLUMNS)
    grew = []
    for rank, (notes, calls, checked, _, seconds) in enumerate(reports):
        first, last = notes[0], notes[-1]
        resident = f"{first.memory / KIB:.1f} - {last.memory / KIB:.1f}"
        threads, descriptors = (f"{getattr(first, x)} - {getattr(last, x)}" for x in ("threads", "descriptors"))
        print(
            f"{rank:>4} {calls:>7} {checked:>7} {seconds:>8.1f} {memory_slope(notes):>19.3f} {resident:>15}"
            f" {threads:>9} {last.waiting:>7} {descriptors:>11}"
        )
        grew += [f"rank {rank}: {what}" for what in what_grew(notes, options.ranks, options.limit)]
    for line in grew:
        print(f"grew: {line}")
    return 1 if grew else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--calls", type=int, default=20_000, help="operators' calls on a group, of each rank")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="repeats a run")
    parser.add_argument("--check", type=int, default=10, help="compare one result in so many")
    parser.add_argument("--limit", type=float, default=0.2, help="growth of memory, KiB a call")
    parser.add_argument("--leak", choices=LEAKS, nargs="+", default=(), help="on rank 0, to see it noticed")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(soak(parse()))
