"""Kernels of the machine from their PTX: the launches that csrc/cuda plans, executed by the emulator."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cuda.block import kernel_module

from .machine import native


@contextmanager
def emulated_kernels(arch: int = 80) -> Iterator[Counter[str]]:
    """Calls of kernels meanwhile are launches on the emulated GPU, with copies that land late and a random schedule.

    An argument can be reached in the bytes that the log has for it, from first to last, and not written if only read.
    Yields how often each kernel was launched.
    """
    launched: Counter[str] = Counter()

    one_at_a_time = threading.Lock()  # ranks are threads, and the emulator takes one launch at a time

    def run(launches: list[tuple[str, int, int, int, bytes]], regions: list[tuple[Any, ...]]) -> None:
        with one_at_a_time:
            for kernel, grid, threads, shared, parameters in launches:
                launched[kernel] += 1
                kernel_module(kernel.removeprefix("ringattn_"), arch).launch(
                    kernel, grid=grid, block=threads, shared_bytes=shared, args=[parameters],
                    seed=random.randrange(5), copies="late", memory=regions,
                )  # fmt: skip

    native.set_runner(run, arch)
    try:
        yield launched
    finally:
        native.set_runner(None, arch)
