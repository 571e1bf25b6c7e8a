"""The machine for tests: streams, memory, faults, and rings whose ranks are threads with a device each."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from emulator.build import build, import_module

import ringattn_ext as ra
import ringattn_ext._C

from .checker import History
from .worker import IN_WORKER

FOLDER = Path(__file__).parent
BUILD = FOLDER.parent.parent / "build" / f"streams-torch-{torch.__version__}"
NAME = "gpudouble"  # as torch calls the devices
PRIVATE_USE = 20  # the number of c10::DeviceType::PrivateUse1


def _device_module() -> ModuleType:
    """What torch asks torch.gpudouble for."""
    module = ModuleType("torch.gpudouble")
    functions: dict[str, Any] = {
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_available": lambda: True,
        "device_count": lambda: native.DEVICES,
        "current_device": lambda: native.current_device(),
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


build(FOLDER, BUILD, [f"-DRINGATTN_TORCH_DIR={Path(torch.__file__).parent}"])
native: Any = None
if IN_WORKER:
    native = import_module(BUILD, "_streams")
    torch._register_device_module(NAME, _device_module())
    ringattn_ext._C.register_kernels(PRIVATE_USE, native.kernel_table())

_numbers = itertools.count()


def device(index: int = 0) -> torch.device:
    return torch.device(NAME, index)


@dataclass
class Rank:
    """What the body of a ring is told."""

    rank: int
    size: int
    group: str  # the name that this rank knows the group by
    device: torch.device

    def mark(self, text: str) -> None:
        native.mark(f"{self.device.index}: {text}")

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """What is enqueued meanwhile on this rank's device is found by History.section(device, name)."""
        self.mark(f"begin {name}")
        yield
        self.mark(f"end {name}")


def make_groups(size: int, *, has_cpu: bool = True) -> list[str]:
    """A new group of `size` ranks: the name that each knows it by. Without has_cpu headers travel on a second group."""
    world = f"ring {next(_numbers)}"
    names = [f"{world}, rank {rank}" for rank in range(size)]
    for rank, name in enumerate(names):
        native.make_group(name, world, rank, size, "both" if has_cpu else "devices")
        if not has_cpu:
            side = f"side of {name}"
            native.make_group(side, f"side of {world}", rank, size, "cpu")
            torch.ops.ringattn.use_side_group(name, side)
    return names


def connect(names: list[str]) -> None:
    """What the first call on a group would do, without faults."""
    native.pause_faults(True)
    _run_threads(names, lambda rank: ra.init(rank.group, device=rank.device))
    native.pause_faults(False)


def run_ring(size: int, body: Callable[[Rank], Any], *, has_cpu: bool = True) -> list:
    """Runs body(rank) as every rank of a new group. Returns the results by rank."""
    names = make_groups(size, has_cpu=has_cpu)
    connect(names)
    return _run_threads(names, body)


def _run_threads(names: list[str], body: Callable[[Rank], Any]) -> list:
    size = len(names)
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            native.set_current_device(rank)
            results[rank] = body(Rank(rank, size, names[rank], device(rank)))
        except BaseException as error:
            failures.append(error)
            native.abort_groups()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


@contextmanager
def using(stream: Any) -> Iterator[None]:
    """Makes a stream current on its device, for this thread."""
    before = native.current_stream(stream.device)
    native.set_current_stream(stream)
    try:
        yield
    finally:
        native.set_current_stream(before)


@contextmanager
def faults(**planted: int | None) -> Iterator[None]:
    """Plants faults: which occurrence of each goes wrong, counted from 0; None: every one."""
    native.clear_faults()
    for name, nth in planted.items():
        native.plant_fault(name, native.EVERY if nth is None else nth)
    try:
        yield
    finally:
        native.clear_faults()


def fresh() -> None:
    """A machine at rest with an empty log."""
    native.destroy_groups()
    native.clear_faults()
    native.reset()
    native.reset_usage()


def history() -> History:
    return History(native.entries(), {stream.number: stream for stream in native.streams()})
