"""Runs one function in several processes that end together, and measures the memory of a process."""

import contextlib
import multiprocessing
import os
import resource
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch


class RankFailure(RuntimeError):
    """A process of `launch` failed; the message holds its error."""


def launch(work: Callable[..., None], processes: int, folder: Path, *args: Any) -> None:
    """Runs work(rank, *args) in fresh processes, ranks 0 ... processes - 1, and returns when all are done.

    The CPUs are divided among them. If one fails, or this process is interrupted, the others are ended. Raises
    RankFailure with the error of the first that failed. `folder` must be empty of earlier failures.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    context = multiprocessing.get_context("spawn")  # a forked child would start with this process's memory
    ranks = [
        context.Process(target=_run, args=(work, rank, threads, folder, args), daemon=True) for rank in range(processes)
    ]
    try:
        for process in ranks:
            process.start()
        running = {process.sentinel: process for process in ranks}
        while running:
            for sentinel in wait(list(running)):
                process = running.pop(sentinel)
                process.join()
                if process.exitcode != 0:
                    raise RankFailure(_first_failure(ranks, folder))
    finally:
        started = [process for process in ranks if process.pid is not None]
        for process in started:
            process.terminate()
        for process in started:
            process.join(5)
            process.kill()


def _run(work: Callable[..., None], rank: int, threads: int, folder: Path, args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends this one
    torch.set_num_threads(threads)
    try:
        work(rank, *args)
    except BaseException:
        # The others fail soon after, for want of this rank: only the first to fail can create the file.
        with contextlib.suppress(FileExistsError), (folder / "failure").open("x") as file:
            file.write(f"rank {rank} failed:\n{traceback.format_exc()}")
        os._exit(1)


def _first_failure(ranks: list[Any], folder: Path) -> str:
    for rank, process in enumerate(ranks):
        if process.exitcode is not None and process.exitcode < 0:  # leaves no message, so it goes before those that do
            return f"rank {rank} was ended by {signal.Signals(-process.exitcode).name}"
    failure = folder / "failure"
    return failure.read_text() if failure.exists() else "a rank ended without an error message"


class PeakMemory:
    """The resident memory of this process in MiB: `resting` when this object is made, `peak()` since then.

    Where the kernel cannot reset its high-water mark, the peak counts from the start of the process.
    """

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to the present VmRSS
        self.resting = _status_mib("VmRSS")

    def peak(self) -> float:
        return _status_mib("VmHWM")


def _status_mib(field: str) -> float:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
