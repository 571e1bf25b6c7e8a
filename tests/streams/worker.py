"""The process in which the double lives. Tests that are marked with `on_the_machine` run there."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import importlib
import multiprocessing
import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

NAME = "streams"
PATIENCE = 280.0  # seconds
IN_WORKER = multiprocessing.current_process().name == NAME


def _serve(connection: Connection) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    while True:
        try:
            module, name, seed, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            random.seed(seed)
            torch.manual_seed(seed)
            getattr(importlib.import_module(module), name).__wrapped__(*args, **kwargs)
            answer = None
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        connection.send(answer)


class _Worker:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, there = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(there,), name=NAME, daemon=True)
        self.process.start()
        there.close()

    def call(self, *what: Any) -> str | None:
        self.connection.send(what)
        if not self.connection.poll(PATIENCE):
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGUSR1)  # where its threads stand
            time.sleep(0.5)
            self.close()
            return f"the worker gave no answer in {PATIENCE} s"
        try:
            return self.connection.recv()
        except EOFError:
            self.close()
            return f"the worker died, exit code {self.process.exitcode}"

    def close(self) -> None:
        self.process.kill()
        self.process.join()


_worker: _Worker | None = None


def on_the_machine(test: Callable[..., None]) -> Callable[..., None]:
    """A test that runs in the worker, with random and torch seeded as they are here. Its arguments are pickled."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        global _worker
        if _worker is None or not _worker.process.is_alive():
            _worker = _Worker()
        failure = _worker.call(test.__module__, test.__name__, random.randrange(2**31), args, kwargs)
        if failure is not None:
            _worker.close()  # it may be in any state
            raise AssertionError(failure)

    return run


@atexit.register
def _close() -> None:
    if _worker is not None:
        _worker.close()
