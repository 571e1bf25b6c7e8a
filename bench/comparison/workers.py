"""Processes that stay up and take turns: ranks of a gloo group, or one process alone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=10)  # of one call


class WorkerFailure(RuntimeError):
    """A process raised or ended; the message holds its error."""


def _serve(rank: int, processes: int, threads: int, store: str, connection: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(threads)
    if processes > 1:
        file = dist.FileStore(store, processes)
        dist.init_process_group("gloo", store=file, rank=rank, world_size=processes, timeout=TIMEOUT)
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            os._exit(0)  # the others may be gone: no goodbye
        try:
            answer = (True, function(*args))
        except Exception:
            answer = (False, f"rank {rank} failed:\n{traceback.format_exc()}")
        connection.send(answer)


class Workers:
    """`processes` fresh ones with `threads` threads each; more than one are a gloo group. Ended with the context."""

    def __init__(self, processes: int, threads: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ringattn-bench-")
        context = multiprocessing.get_context("spawn")  # a forked child would inherit a pool of threads
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(processes):
            here, there = context.Pipe()
            args = (rank, processes, threads, str(Path(self._folder.name, "store")), there)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What the function, one of a module, returned in every process. They run it at the same time."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # of one that has ended: found below
                connection.send((function, args))
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        answers: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), timeout=TIMEOUT.total_seconds())
            if not ready:
                raise WorkerFailure(f"no answer from ranks {sorted(waiting.values())}")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    good, answers[rank] = connection.recv()
                except (EOFError, OSError):
                    raise WorkerFailure(f"rank {rank} ended") from None
                if not good:
                    raise WorkerFailure(answers[rank])
        return [answers[rank] for rank in sorted(answers)]

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            if error is not None:
                process.terminate()
            process.join(5)
            process.kill()
        self._folder.cleanup()
