"""A rank under a fault: does what the leader asks for, step by step, and says as JSON what came of it.

It stays until it is told to leave, so that nothing that the others notice is the end of this process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import small_call
import torch
import torch.distributed as dist

import ringattn_ext as ra
from faults import inject, jobs, links
from faults.cases import KIB, Case, moment
from faults.census import what_it_holds_soon

RECOVERY_TIMEOUT = 20.0
BEFORE_DESTROY = 0.3  # s
QUIET = 0.3  # s, in which nobody does anything
CANARIES = 6  # tensors of the size of a block
HELD = 5.0  # s for which a rank beside the victim is busy, in jobs that say so
ATTRIBUTES = ("rank", "peer", "group", "call", "hop")


class Raised(RuntimeError):
    """What a rank raises between the passes."""


class Stopped(Exception):
    """What a user's handler of Ctrl-C raises."""


def _stop(*_: object) -> NoReturn:
    raise Stopped("by the user's handler")


def live(case: Case, rank: int, folder: Path, notices: list[inject.Notice], connection: Connection) -> NoReturn:
    """The life of a rank, in a process of its own."""
    try:
        _settle(case, folder / f"stderr{rank}")
        place = Place(case, rank, folder, notices)
        connection.send_bytes(b'"here"')  # for the leader to connect
        while (command := json.loads(connection.recv_bytes()))[0] != "leave":
            answer = getattr(place, command[0])(*command[1:])
            connection.send_bytes(json.dumps(answer).encode())
        ctypes.CDLL(None).exit(0)  # with the destructors of C++, and without the end of Python, which takes its time
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _settle(case: Case, stderr: Path) -> None:
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    # Without this it would be ignored by what is started in the background.
    signal.signal(signal.SIGINT, _stop if case.job == "handler" else signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if case.what.needs == "namespaces":
        links.leave_network()
        os.environ["GLOO_SOCKET_IFNAME"] = links.DEVICE


def held_rank(case: Case) -> int:
    return (case.victim + 1) % case.P


def describe(error: BaseException | None) -> dict[str, Any] | None:
    if error is None:
        return None
    about: dict[str, Any] = {"type": type(error).__name__, "text": str(error)}
    for name in ATTRIBUTES:
        value = getattr(error, name, "absent")
        about[name] = value if isinstance(value, int | str | None) else repr(value)
    return about


def shape_of(block: int) -> tuple[int, int, int, int]:
    """[B, H, tokens, D] of keys in float32 such that keys and values have so many bytes; large ones are little work."""
    return (1, 2, block // (2 * 4 * 2 * 8), 8) if block <= KIB else (block // (2 * 4 * 64 * 16 * 256), 64, 16, 256)


def attempt(function: Callable[..., Any], *args: Any) -> tuple[dict[str, Any] | None, Any]:
    """The error, or what is returned."""
    try:
        return None, function(*args)
    except (Exception, KeyboardInterrupt) as error:
        return describe(error), None


class Place:
    """What a rank knows, and its answers to the leader. Each answer is data that JSON can carry."""

    def __init__(self, case: Case, rank: int, folder: Path, notices: list[inject.Notice]) -> None:
        self.case, self.rank, self.folder, self.notices = case, rank, folder, notices
        generator = torch.Generator().manual_seed(1000 + rank)
        self.inputs = [torch.randn(shape_of(case.block), generator=generator) for _ in range(4)]
        self.pass_started = 0.0
        self.stage = ""

    # --- commands ---

    def start(self) -> dict[str, Any]:
        """A group that comes and goes, for what is made once in a process; then the group of the case, and the pass to
        compare with."""
        self._join("first", self.rank, self.case.P, RECOVERY_TIMEOUT)
        small_call.prove()
        cpu = time.process_time()
        self.expected = self._attend()
        self.usual_cpu = time.process_time() - cpu
        dist.destroy_process_group()
        self.at_rest = what_it_holds_soon(patience=0.05)
        self._join("case", self.rank, self.case.P, self.case.timeout)
        if not self.case.job.startswith("fresh"):
            small_call.prove()
        return {"group": dist.group.WORLD.group_name, "pid": os.getpid()}

    def run(self) -> dict[str, Any]:
        """The pass under the fault, or a job."""
        if self.case.what.action and self.rank == self.case.actor and self.case.phase != "between":
            when = moment(self.case.phase, self.case.P)
            inject.arm(self.case.what.action, when, self.case.patience, self.notices[self.rank])
        if self.case.job.endswith("held") and self.rank == held_rank(self.case):
            self.busy = inject.Notice()
            inject.arm("hold", moment(self.case.phase, self.case.P), 0.0, self.busy)
            timer = threading.Timer(HELD, setattr, (self.busy, "released", 1))
            timer.daemon = True
            timer.start()
        if self.case.fault in ("destroy", "aside") and self.rank == self.case.victim:
            return self._pass_aside()
        job = getattr(jobs, self.case.job, None)
        return self._pass() if job is None else self._pass() | {"job": job(self.rank, self.case)}

    def call_again(self) -> dict[str, Any]:
        """The next calls on the group: of each kind if it should be broken, else one that is right."""
        if not dist.is_initialized():
            return {}
        call = small_call.small_call(self.rank, self.case.P)
        calls: dict[str, Callable[[], Any]] = {
            "ring_attention": lambda: ra.ring_attention(**call),
            "unshard": lambda: ra.unshard(call["query"], 2, seq_len=call["seq_len"]),
            "init": ra.init,
        }
        if self.case.ends in ("well", "refused"):
            calls = {"prove": small_call.prove}
        answers = {}
        for name, function in calls.items():
            start = time.monotonic()
            error, _ = attempt(function)
            answers[name] = {"error": error, "seconds": time.monotonic() - start}
        return answers

    def recover(self, members: list[int]) -> dict[str, Any]:
        """The group is destroyed, and those that are left make a new one. What is left of either? And is memory that
        the pass has given back still written?"""
        cpu = time.process_time()
        time.sleep(QUIET)
        busy = (time.process_time() - cpu) / QUIET
        attempt(ra.release_workspace)
        canaries = [torch.full((self.case.block // 4,), float(i)) for i in range(CANARIES)]
        start = time.monotonic()
        error, _ = attempt(dist.destroy_process_group) if dist.is_initialized() else (None, None)
        answer: dict[str, Any] = {
            "destroy": error,
            "seconds": time.monotonic() - start,
            "at_rest": self.at_rest,
            "busy": busy,
        }
        answer["after_destroy"] = what_it_holds_soon(self.at_rest)
        answer["error"], _ = attempt(self._prove_new_group, members)
        answer["after_recovery"] = what_it_holds_soon(self.at_rest)
        answer["canaries_live"] = all(bool((canary == i).all()) for i, canary in enumerate(canaries))
        return answer

    # --- how ---

    def _pass(self) -> dict[str, Any]:
        error, results = None, None
        while error is None and (results is None or self.case.fault == "ambush"):
            cpu = time.process_time()
            error, results = attempt(self._attend, self._between)
        answer: dict[str, Any] = {
            "ended": time.monotonic(),
            "started": self.pass_started,
            "cpu": time.process_time() - cpu - self.usual_cpu,
            "in": self.stage,
            "error": error,
        }
        if error is None:
            answer["equal"] = all(torch.equal(a, b) for a, b in zip(results, self.expected, strict=True))
        return answer

    def _pass_aside(self) -> dict[str, Any]:
        """The pass in another thread; this one destroys the group as soon as the other rank is held, or is
        interrupted."""
        answers: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: answers.append(self._pass()), daemon=True)
        thread.start()
        interrupted = False
        try:
            while self.notices[self.case.actor].at == 0.0:
                time.sleep(0.01)
            if self.case.fault == "destroy":
                time.sleep(BEFORE_DESTROY)
                dist.destroy_process_group()
            while not answers:
                time.sleep(0.01)  # not join: once interrupted, it takes the thread for ended
        except KeyboardInterrupt:
            interrupted = True
        while not answers:
            time.sleep(0.01)
        thread.join()
        return answers[0] | {"interrupted": interrupted}

    def _join(self, store: str, rank: int, size: int, timeout: float) -> None:
        path = self.folder / f"store-{store}"
        of_tcp = self.case.job == "tcp" and store == "case"
        kept = self._tcp_store(path, size) if of_tcp else dist.FileStore(str(path), size)
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=kept, rank=rank, world_size=size, timeout=limit)

    def _tcp_store(self, path: Path, size: int) -> dist.TCPStore:
        """Rank 0 keeps it; the file tells where."""
        if self.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
            path.with_suffix(".part").write_text(str(store.port))
            path.with_suffix(".part").rename(path)
            return store
        while not path.exists():
            time.sleep(0.01)
        return dist.TCPStore("127.0.0.1", int(path.read_text()), size, is_master=False)

    def _prove_new_group(self, members: list[int]) -> None:
        self._join("recovery", members.index(self.rank), len(members), RECOVERY_TIMEOUT)
        try:
            small_call.prove()
        finally:
            dist.destroy_process_group()

    def _attend(self, between: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
        """A causal pass and its backward: out and gradients."""
        leaves = [tensor.clone().requires_grad_() for tensor in self.inputs[:3]]
        self._enter("forward")
        out = ra.ring_attention(*leaves, is_causal=True)
        self._enter("between")
        between()
        self._enter("backward")
        gradients = torch.autograd.grad((out * self.inputs[3]).sum(), leaves)
        self._enter("")
        return [out.detach(), *gradients]

    def _enter(self, stage: str) -> None:
        self.stage, self.pass_started = stage, time.monotonic()

    def _between(self) -> None:
        if self.case.phase != "between" or self.rank != self.case.actor:
            return
        time.sleep(self.case.patience)
        if self.case.what.action == "raise":
            self.notices[self.rank].at = time.monotonic()
            raise Raised("injected between the passes")
        inject.act(self.case.what.action, self.notices[self.rank])
