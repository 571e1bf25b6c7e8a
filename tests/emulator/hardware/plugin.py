"""pytest's side: watches all launches of a run, prints the summary and fails the run if a GPU differs."""

from __future__ import annotations

import os

import pytest

from .. import module
from .driver import CudaDriver, NoDriver
from .fake import FakeDriver
from .job import Executor, Job, Outcome
from .record import Recorder, Runner
from .worker import Worker

VARIABLE = "RINGATTN_HARDWARE"


class InProcess:
    """Runs jobs in this process, on a driver that cannot hurt it."""

    def __init__(self, driver: FakeDriver) -> None:
        self.name, self.capability = driver.name, driver.capability
        self._executor = Executor(driver)

    def run(self, job: Job) -> Outcome:
        return self._executor.run(job)


def runner_of(mode: str) -> Runner:
    if mode == "fake":
        return InProcess(FakeDriver())
    if mode != "1":
        raise NoDriver(f"expected 1 or fake, got {mode!r}")
    return Worker(CudaDriver)


class Hardware:
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        module.watch = recorder

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.recorder.differences and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("hardware", red=bool(self.recorder.differences), bold=True)
        for line in self.recorder.summary():
            terminalreporter.write_line(line)

    def pytest_unconfigure(self) -> None:
        module.watch = None
        if isinstance(self.recorder.runner, Worker):
            self.recorder.runner.close()


def register(config: pytest.Config) -> None:
    """For pytest_configure of a conftest.py: does nothing unless RINGATTN_HARDWARE is set."""
    mode = os.environ.get(VARIABLE)
    if not mode:
        return
    try:
        config.pluginmanager.register(Hardware(Recorder(runner_of(mode))), "ringattn-hardware")
    except NoDriver as error:
        raise pytest.UsageError(f"{VARIABLE}={mode}: {error}") from None
