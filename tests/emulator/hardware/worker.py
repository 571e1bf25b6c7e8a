"""A process that owns the GPU: a kernel that hangs, traps or writes anywhere costs that process, not the test run."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection

from .driver import Driver, NoDriver
from .job import RUN, Executor, Job, Outcome

TIMEOUT = 120.0  # seconds; the first launch of a module compiles it


def _serve(connection: Connection, make: Callable[[], Driver]) -> None:
    try:
        driver = make()
    except NoDriver as error:
        connection.send(str(error))
        return
    connection.send((driver.name, driver.capability, driver.version))
    executor = Executor(driver)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(executor.run(job))


class Worker:
    """Runs jobs in a process of its own, which a failed kernel or a timeout ends and the next job starts anew."""

    def __init__(self, make: Callable[[], Driver], timeout: float = TIMEOUT) -> None:
        self._make, self._timeout = make, timeout
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, self._make), daemon=True)
        self._process.start()
        there.close()
        if not self._connection.poll(self._timeout):
            self.close()
            raise NoDriver(f"no CUDA GPU: the driver did not start in {self._timeout:.0f} s")
        answer = self._connection.recv()
        if isinstance(answer, str):
            self.close()
            raise NoDriver(answer)
        self.name, self.capability, self.version = answer

    def run(self, job: Job) -> Outcome:
        if self._connection is None:
            self._start()
        assert self._connection is not None
        try:
            self._connection.send(job)
            if not self._connection.poll(self._timeout):
                self.close()
                text = f"it did not end in {self._timeout:.0f} s"
                return Outcome(error="HANGS", stage=RUN, text=text)
            outcome = self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            process = self._process
            if process is not None:
                process.join(5)
            code = process.exitcode if process is not None else None
            self.close()
            return Outcome(error="DIED", stage=RUN, text=f"the process that held the GPU died, exit code {code}")
        if outcome.error:  # most errors of kernels leave a process in which nothing works any more
            self.close()
        return outcome

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._connection = self._process = None
