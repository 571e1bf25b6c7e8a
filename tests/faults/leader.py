"""The leader of a case: forks its ranks, does to them what only another process can, and reports what they said.

A rank is asked for one thing at a time (see rank.py), all ranks together. One that does not answer in time leaves the
stacks of its threads in the report, and all ranks are killed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from faults import inject, links
from faults.cases import LOST_RANK, Case
from faults.rank import live

STEP_LIMIT = 45.0  # s, for what no fault delays
AGAIN_LIMIT = 20.0
LEAVE_LIMIT = 10.0
GDB_LIMIT = 30.0
MARGIN = 3.0  # s beyond a bound: a report says by how much it was missed
BEFORE_INTERRUPT = 0.5  # s; by then the victim waits
FLAP = 3.0  # s
MIDWAY = 0.3  # s after which a block of 8 MiB is on a slow link
LONGEST_AMBUSH = 0.5  # s


class Overrun(Exception):
    """Some ranks have not answered in time."""


def lead(case: Case, connection: Connection) -> NoReturn:
    """One case, and the end of this process."""
    folder = Path(tempfile.mkdtemp(prefix="ringattn-faults-"))
    leader = Leader(case, folder)
    leader.fork(connection)
    try:
        leader.play()
    except Overrun:
        pass
    except Exception as error:
        leader.report["broken"] = f"{type(error).__name__}: {error}"
    connection.send_bytes(json.dumps(leader.finish()).encode())
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def native_stacks(pid: int) -> str:
    """Of all threads of a process, where there is a debugger."""
    if shutil.which("gdb") is None:
        return ""
    command = ["gdb", "-p", str(pid), "-batch", "-nx", "-ex", "thread apply all backtrace 16"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GDB_LIMIT)
    except subprocess.TimeoutExpired:
        return f"gdb took longer than {GDB_LIMIT} s\n"
    return "".join(f"{line[:200]}\n" for line in done.stdout.splitlines() if line.startswith(("#", "Thread ")))


class Leader:
    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.pids: list[int] = []
        self.connections: list[Connection] = []
        self.notices = inject.shared_notices(case.P)
        self.alive = set(range(case.P))
        self.report: dict[str, Any] = {
            "steps": {},  # what each rank answered, by step and rank
            "fault_at": 0.0,  # when it began, for the other ranks
            "cleared_at": 0.0,  # when a rank that could not notice it was set free again
            "stacks": {},  # of the ranks that have not answered
            "broken": "",  # why the case could not be played to its end
            "cpu": 0.0,  # seconds, of all ranks
        }

    # --- processes ---

    def fork(self, *private: Connection) -> None:
        """Makes the ranks. private: connections that are not for them."""
        if self.case.what.needs == "namespaces":
            links.leave_network()
            links.make_bridge()
        for rank in range(self.case.P):
            here, there = Pipe()
            pid = os.fork()
            if pid == 0:
                for connection in (here, *self.connections, *private):
                    connection.close()
                live(self.case, rank, self.folder, self.notices, there)
            there.close()
            self.pids.append(pid)
            self.connections.append(here)

    def finish(self) -> dict[str, Any]:
        """The report, when no rank is left. exits: exit codes, negative for signals."""
        deadline = time.monotonic() + (0.0 if self.report["stacks"] or self.report["broken"] else LEAVE_LIMIT)
        codes: dict[int, int] = {}
        while len(codes) < self.case.P:
            for rank, pid in enumerate(self.pids):
                if rank not in codes and (ended := os.wait4(pid, os.WNOHANG))[0] == pid:
                    codes[rank] = os.waitstatus_to_exitcode(ended[1])
                    self.report["cpu"] += ended[2].ru_utime + ended[2].ru_stime
            if time.monotonic() > deadline:
                for rank in set(range(self.case.P)) - set(codes):
                    os.kill(self.pids[rank], signal.SIGKILL)
            time.sleep(0.01)
        self.report["exits"] = codes
        self.report["stderr"] = {rank: self._stderr(rank) for rank in range(self.case.P)}
        return self.report

    def _stderr(self, rank: int) -> str:
        path = self.folder / f"stderr{rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    # --- questions and answers ---

    def tell(self, ranks: Iterable[int], *command: Any) -> None:
        for rank in ranks:
            self.connections[rank].send_bytes(json.dumps(command).encode())

    def hear(self, step: str, ranks: Iterable[int], deadline: float) -> None:
        """Puts the answers into the report. Those of ranks that have died stay away; missing ones are an Overrun."""
        answers = self.report["steps"].setdefault(step, {})
        missing = {id(self.connections[rank]): rank for rank in ranks}
        while missing:
            ready = wait([self.connections[r] for r in missing.values()], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._keep_stacks(missing.values())
                raise Overrun
            for connection in ready:
                rank = missing.pop(id(connection))
                try:
                    answers[rank] = json.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self.alive.discard(rank)

    def ask(self, step: str, *args: Any, limit: float = STEP_LIMIT) -> None:
        self.tell(self.alive, step, *args)
        self.hear(step, set(self.alive), time.monotonic() + limit)

    def _keep_stacks(self, ranks: Iterable[int]) -> None:
        before = {rank: len(self._stderr(rank)) for rank in ranks}
        for rank in before:
            os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(0.5)
        self.report["stacks"] = {
            rank: self._stderr(rank)[length:] + native_stacks(self.pids[rank]) for rank, length in before.items()
        }

    # --- the case ---

    def play(self) -> None:
        self.hear("here", set(self.alive), time.monotonic() + STEP_LIMIT)
        if self.case.what.needs == "namespaces":
            for rank, pid in enumerate(self.pids):
                links.connect(rank, pid)
        self.ask("start")
        assert len(self.alive) == self.case.P, f"ranks are gone before the fault, not {sorted(self.alive)}"
        self.tell(self.alive, "run")
        if self.case.what.action:
            self._wait_for_actor()
        else:
            self._fault_is_now()
        getattr(self, f"_{self.case.fault}", self._nothing_more)()
        self.ask("call_again", limit=AGAIN_LIMIT)
        self.ask("recover", sorted(self.alive))
        self.tell(self.alive, "leave")

    def _wait_for_actor(self) -> None:
        deadline = time.monotonic() + STEP_LIMIT
        while self.notices[self.case.actor].at == 0.0:
            in_time = time.monotonic() < deadline and not self.connections[self.case.actor].poll()
            assert in_time, f"rank {self.case.actor} has not come to the moment"
            time.sleep(0.001)
        self.report["fault_at"] = self.notices[self.case.actor].at

    def _fault_is_now(self) -> None:
        self.report["fault_at"] = time.monotonic()

    def _release(self) -> None:
        self.notices[self.case.actor].released = 1

    def _continue(self) -> None:
        os.kill(self.pids[self.case.actor], signal.SIGCONT)

    def _hear_others(self) -> None:
        """All but the rank that cannot speak."""
        self.hear("run", self.alive - {self.case.actor}, self.report["fault_at"] + self.case.bound + MARGIN)

    def _hear_all(self) -> None:
        self.hear("run", set(self.alive), self.report["fault_at"] + self.case.bound + MARGIN)

    def _hear_actor(self) -> None:
        """Which has been set free."""
        self.report["cleared_at"] = time.monotonic()
        self.hear("run", {self.case.actor}, time.monotonic() + LOST_RANK + MARGIN)

    def _nothing_more(self) -> None:  # kill, exit, raise
        self._hear_all()

    def _interrupt(self) -> None:
        time.sleep(BEFORE_INTERRUPT)
        self._fault_is_now()
        os.kill(self.pids[self.case.victim], signal.SIGINT)
        self._hear_others()
        self._release()
        self._hear_actor()

    def _aside(self) -> None:
        time.sleep(BEFORE_INTERRUPT)
        os.kill(self.pids[self.case.victim], signal.SIGINT)
        time.sleep(self.case.pause)
        self._release()
        self._hear_all()

    def _ambush(self) -> None:
        time.sleep(random.uniform(0.0, LONGEST_AMBUSH))
        self._fault_is_now()
        os.kill(self.pids[self.case.victim], signal.SIGKILL)
        self._hear_all()

    def _destroy(self) -> None:
        self._hear_others()
        self._release()
        self._hear_actor()

    def _stop(self) -> None:
        self._hear_others()
        self._continue()
        self._hear_actor()

    def _pause(self) -> None:
        time.sleep(self.case.pause)
        self._continue()
        self._hear_all()

    def _slow(self) -> None:
        time.sleep(self.case.pause)
        self._release()
        self._hear_all()

    def _reset(self) -> None:
        failing = links.FailingReads(self.pids[self.case.victim], self.folder)
        try:
            self._fault_is_now()
            self._release()
            self._hear_all()
        finally:
            failing.end()

    def _cut(self) -> None:
        links.cut(self.case.victim)
        self._fault_is_now()
        self._release()
        self._hear_all()
        links.mend(self.case.victim)

    def _flap(self) -> None:
        links.cut(self.case.victim)
        self._release()
        time.sleep(FLAP)
        links.mend(self.case.victim)
        self._hear_all()

    def _rate(self) -> None:
        links.slow_down(self.case.victim, self.pids[self.case.victim])
        self._release()
        self._hear_all()

    def _midway(self) -> None:
        links.slow_down(self.case.victim, self.pids[self.case.victim])
        self._release()
        time.sleep(MIDWAY)
        self._fault_is_now()
        os.kill(self.pids[self.case.victim], signal.SIGKILL)
        self._hear_all()
