"""Real processes for the tests: pools of ranks that stay up, one per ring size and backend, and run functions on all.

A test hands over a module-level function; it runs in every process of the pool with torch.distributed initialised, and
the pool gives back the list of what the ranks returned. A rank that raises fails the test with its traceback. A call
that takes too long kills the pool, prints where every rank stood, and fails; the next call starts a new pool.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GROUP_TIMEOUT = timedelta(seconds=30)


class RankFailure(AssertionError):
    """At least one rank raised or did not answer."""


def _serve(rank: int, world_size: int, store: str, connection: Connection, backend: str) -> None:
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # several ranks on one GPU, from NCCL 2.30 on
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        backend, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
    )
    while True:
        try:
            function, args, kwargs = connection.recv()
        except EOFError:
            break
        try:
            answer = (True, function(*args, **kwargs))
        except BaseException as error:
            answer = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        connection.send(answer)
    os._exit(0)  # the other ranks may be gone: no goodbye


class RankPool:
    """`world_size` processes, each a rank of one world group."""

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="ringattn-ranks-")
        context = multiprocessing.get_context("spawn")
        store = str(Path(self._folder.name, "store"))
        self._connections, self._processes = [], []
        for rank in range(world_size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, store, there, backend), daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
        for connection in self._connections:
            connection.send((function, args, kwargs))
        deadline = time.monotonic() + timeout
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < self.world_size:
            waiting = {id(c): r for r, c in enumerate(self._connections) if r not in answers}
            ready = wait([self._connections[r] for r in waiting.values()], max(0.0, deadline - time.monotonic()))
            if not ready:
                self._dump_stacks(list(waiting.values()))
                self.close()
                raise RankFailure(
                    f"ranks {sorted(waiting.values())} of {self.world_size} gave no answer in {timeout} s"
                )
            for connection in ready:
                rank = waiting[id(connection)]
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    code = self._processes[rank].exitcode
                    self.close()
                    raise RankFailure(f"rank {rank} of {self.world_size} died, exit code {code}") from None
        failures = [f"rank {r}: {text}" for r, (ok, text) in sorted(answers.items()) if not ok]
        if failures:
            self.close()  # the ranks may no longer be in step
            raise RankFailure("\n".join(failures))
        return [answers[rank][1] for rank in range(self.world_size)]

    def _dump_stacks(self, ranks: list[int]) -> None:
        for rank in ranks:
            pid = self._processes[rank].pid
            if pid is not None:
                os.kill(pid, signal.SIGUSR1)
                time.sleep(0.2)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


_pools: dict[tuple[int, str], RankPool] = {}


def pool_of(world_size: int, backend: str = "gloo") -> RankPool:
    pool = _pools.get((world_size, backend))
    if pool is None or not pool.alive:
        pool = _pools[world_size, backend] = RankPool(world_size, backend)
    return pool


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any) -> list:
    """Runs function(*args, **kwargs) on every rank of a ring of `world_size` processes; returns the results by rank."""
    return pool_of(world_size).run(function, *args, timeout=timeout, **kwargs)


@atexit.register
def _close_pools() -> None:
    for pool in _pools.values():
        pool.close()
