"""One launch on a GPU: memory as the emulator had it before goes there, the kernel runs, memory comes back."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from .driver import Driver, DriverError
from .pointers import Place, from_device, functions, moved_map, tensor_maps, to_device

GUARD = 512  # bytes before and behind every array that nothing may write
_GUARD = bytes([0xC3]) * GUARD
# Failures of these stages are no verdict on results: the driver refuses the module or the launch as such.
LOAD, PLACE, RUN = "load", "place", "run"


@dataclass
class Array:
    """A region of emulated memory."""

    address: int
    name: str
    before: bytes
    after: bytes = b""  # the emulator's
    dtype: str = ""  # numpy's
    pointers: bool = True  # its words may be pointers


@dataclass
class Job:
    ptx: str
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    parameters: bytes
    arrays: list[Array]
    variables: list[Array]


@dataclass
class Outcome:
    """What the GPU made of a job; memory with the emulator's pointers."""

    error: str = ""  # of the driver, "" if none
    stage: str = ""  # where: LOAD, PLACE or RUN
    text: str = ""
    arrays: list[bytes] = field(default_factory=list)
    variables: list[bytes | None] = field(default_factory=list)  # None: not exported
    beside: list[str] = field(default_factory=list)  # arrays around which something was written
    lowered: bool = False  # the PTX version


def ptx_version(driver_version: int) -> str:
    """The newest PTX version that the driver of a CUDA version (12080) knows."""
    major, minor = driver_version // 1000, driver_version % 1000 // 10
    if major == 12:
        return f"8.{minor if minor < 6 else minor - 1}"  # 12.5 and 12.6 both have 8.5
    return f"{major - 4}.{minor}"


def load(driver: Driver, ptx: str) -> tuple[Any, bool]:
    """The module; whether its PTX version had to be lowered to what the driver knows."""
    try:
        return driver.load(ptx), False
    except DriverError as error:
        if error.name != "CUDA_ERROR_UNSUPPORTED_PTX_VERSION":
            raise
    older = re.sub(r"^\.version\s+\S+", f".version {ptx_version(driver.version)}", ptx, count=1, flags=re.MULTILINE)
    return driver.load(older), True


def with_maps(driver: Driver, data: bytes, places: list[Place]) -> bytes:
    """Bytes with all that points translated: words, and tensor maps made anew by the driver."""
    moved = bytearray(to_device(data, places))
    for at, what in tensor_maps(data):
        encoded = driver.tensor_map(moved_map(what, places))
        moved[at : at + len(encoded)] = encoded
    return bytes(moved)


class Executor:
    """Runs jobs on a driver. Keeps modules whose variables it can all set again."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._modules: dict[str, tuple[Any, bool]] = {}

    def run(self, job: Job) -> Outcome:
        outcome = Outcome(stage=LOAD)
        try:
            module, outcome.lowered = self._modules.get(job.ptx) or load(self.driver, job.ptx)
            outcome.stage = PLACE
            found = [self.driver.variable(module, one.name) for one in job.variables]
            if None not in found and len(self._modules) < 64:
                self._modules[job.ptx] = module, outcome.lowered
            arena = self.driver.allocate(sum(_room(one) for one in job.arrays) + GUARD)
            self._launch(job, module, arena, found, outcome)
            self.driver.free(arena)
            if job.ptx not in self._modules:
                self.driver.unload(module)
        except DriverError as error:
            outcome.error, outcome.text = error.name, str(error)
        return outcome

    def _launch(self, job: Job, module: Any, arena: int, found: list[tuple[int, int] | None], outcome: Outcome) -> None:
        driver = self.driver
        places, at = [], arena + GUARD
        for one in job.arrays:
            places.append(Place(one.address, at, len(one.before)))
            at += _room(one)
        for variable, where in zip(job.variables, found, strict=True):
            if where is not None:
                places.append(Place(variable.address, where[0], where[1]))
        content = bytearray(_GUARD)
        for one in job.arrays:
            content += with_maps(driver, one.before, places) if one.pointers else one.before
            content += bytes([0xC3]) * (_room(one) - len(one.before))
        driver.write(arena, bytes(content))
        for variable, where in zip(job.variables, found, strict=True):
            if where is not None:
                moved = bytearray(with_maps(driver, variable.before, places))
                for offset in functions(variable.before):  # their addresses on the GPU came with the module
                    moved[offset : offset + 8] = driver.read(where[0] + offset, 8)
                driver.write(where[0], bytes(moved[: where[1]]))
        parameters = with_maps(driver, job.parameters, places)
        outcome.stage = RUN
        driver.run(module, job.kernel, job.grid, job.block, job.shared_bytes, parameters)
        content = bytearray(driver.read(arena, len(content)))
        at = GUARD
        for one in job.arrays:
            end = at + len(one.before)
            data = bytes(content[at:end])
            outcome.arrays.append(from_device(data, one.after, places) if one.pointers else data)
            around = content[at - GUARD : at] + content[end : at + _room(one)]
            if around != bytes([0xC3]) * len(around):
                outcome.beside.append(one.name)
            at += _room(one)
        for variable, where in zip(job.variables, found, strict=True):
            if where is None:
                outcome.variables.append(None)
                continue
            moved = bytearray(driver.read(where[0], len(variable.before)))
            for offset in functions(variable.after):
                moved[offset : offset + 8] = variable.after[offset : offset + 8]
            outcome.variables.append(from_device(bytes(moved), variable.after, places))
        outcome.stage = ""


def _room(one: Array) -> int:
    """Bytes of an array and the guard behind it, so that the next one starts at a multiple of GUARD."""
    return -(-len(one.before) // GUARD) * GUARD + GUARD
