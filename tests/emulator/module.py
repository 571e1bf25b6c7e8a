"""Modules and launches: arguments become parameter bytes, arrays become windows of global memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .build import EmulatorError, native

_NUMPY_TYPES = {
    **{f"u{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"b{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"f{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
}
_FIRST_WINDOW = 4096  # the windows below belong to variables of the module
_windows: dict[int, tuple[int, weakref.ref[np.ndarray]]] = {}  # id of an array: its window
_next_window = _FIRST_WINDOW


def address(array: np.ndarray) -> int:
    """The address of an array in the global memory of every later launch, for structs that hold pointers.

    It is valid while the array lives. A window of 2^40 bytes around it is empty.
    """
    global _next_window
    if not array.flags.c_contiguous:
        raise ValueError("arrays must be contiguous")
    known = _windows.get(id(array))
    if known is None or known[1]() is not array:
        if _next_window == 1 << 16:
            _next_window = _FIRST_WINDOW
        taken = {window for window, _ in _windows.values()}
        while _next_window in taken:
            _next_window += 1
        key = id(array)
        _windows[key] = (_next_window, weakref.ref(array, lambda _: _windows.pop(key, None)))
        known = _windows[key]
        _next_window += 1
    return (known[0] << 40) + (1 << 20)


@dataclass
class Traffic:
    """Bytes that lanes asked for, 32-byte sectors that this touched, and sectors that the distinct bytes would fill."""

    bytes: int
    sectors: int
    ideal: int


@dataclass
class Report:
    """Counters of a launch; all exact. Instructions are warp instructions."""

    total: int
    instructions: dict[str, int]  # by class
    forms: dict[str, int]  # by opcode with its suffixes and the special registers that it reads
    lines: dict[int, int]  # PTX line: executions
    shared: dict[int, tuple[int, int]]  # PTX line: transactions, and how many without bank conflicts
    matrix_flops: int
    barriers: int
    global_read: Traffic
    global_write: Traffic
    copied_bytes: int  # by bulk and tensor copies
    printed: str  # by printf
    conflicts: int = field(init=False)  # transactions beyond the ideal

    def __post_init__(self) -> None:
        self.conflicts = sum(found - ideal for found, ideal in self.shared.values())


@dataclass
class Launch:
    """A launch as the machine takes it: for those who repeat it elsewhere."""

    module: Module
    kernel: str  # its whole name
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    parameters: bytes
    arrays: list[tuple[int, str, np.ndarray]]  # all of global memory but the module's variables: address, name
    undefined: str  # see Module.launch


# Called before every launch; what it returns is called with the report or the error. See hardware/.
watch: Callable[[Launch], Callable[[Report | EmulatorError], None]] | None = None


def _three(extent: int | Sequence[int]) -> tuple[int, int, int]:
    given = (extent,) if isinstance(extent, int) else tuple(int(one) for one in extent)
    return (*given, 1, 1)[:3]


class Module:
    """PTX, decoded. Its __device__ variables keep their values from launch to launch."""

    def __init__(self, ptx: str):
        self.ptx = ptx
        self._native = native.Module(ptx)

    @property
    def kernels(self) -> list[str]:
        return self._native.kernels()

    @property
    def rows(self) -> dict[str, str]:
        """The row of the instruction table ("add us", "add f") of every form in this module ("add.s32")."""
        return self._native.rows()

    @property
    def variables(self) -> list[tuple[str, int, int]]:
        """(name, address, bytes) of each."""
        return self._native.variables()

    def variable(self, name: str, dtype: Any = np.uint8) -> np.ndarray:
        """A view of a __device__ or __constant__ variable."""
        return np.frombuffer(self._native.variable(name), dtype)

    def launch(
        self,
        kernel: str,
        grid: int | Sequence[int] = 1,
        block: int | Sequence[int] = 32,
        shared_bytes: int = 0,
        args: Sequence[Any] = (),
        seed: int = 0,
        copies: str = "late",
        check_races: bool = True,
        threads: int = 1,
        schedule: str | None = None,
        limit: int = 2_000_000_000,
        undefined: str = "",
        memory: Sequence[tuple[int, int, int, str, bool]] = (),
    ) -> Report:
        """Runs a kernel; kernel is its name, or a part of it that only one name has.

        args: numpy arrays (global memory, read and written in place; read-only ones may not be written), numpy or
        Python scalars (the latter take the type that the kernel declares), bytes for structs. seed chooses the
        schedule: 0 in order, odd numbers random, even ones adversarial (one warp runs as far ahead as it can), unless
        schedule names one. copies: when asynchronous copies land. threads: host threads that share the blocks.
        limit: warp instructions after which a launch counts as a deadlock; 0: none. undefined: why a GPU may give other
        results, if it may (an order of lanes that PTX does not define, say); tells hardware/ not to compare.
        memory: what else can be reached: (address, pointer of the host, bytes, name, read only), each in a window of
        its own.
        Raises EmulatorError at the first error.
        """
        parameters = self._native.parameters(kernel)
        if len(args) != len(parameters):
            raise TypeError(f"{kernel} takes {len(parameters)} arguments, not {len(args)}")
        packed = bytearray(max((offset + size for _, size, offset in parameters), default=0))
        regions, arrays = list(memory), []
        named = {}
        for i, (argument, (type_name, size, offset)) in enumerate(zip(args, parameters, strict=True)):
            if isinstance(argument, np.ndarray):
                data = np.uint64(address(argument)).tobytes()
                named[id(argument)] = f"argument {i}"
            elif isinstance(argument, bytes | bytearray | memoryview):
                data = bytes(argument)
            elif isinstance(argument, np.generic):
                data = argument.tobytes()
            else:
                data = np.array(argument).astype(_NUMPY_TYPES[type_name]).tobytes()
            if len(data) != size:
                raise TypeError(f"argument {i} has {len(data)} bytes; {kernel} declares {size}")
            packed[offset : offset + size] = data
        for key, (_, reference) in list(_windows.items()):
            array = reference()
            if array is not None:
                name = named.get(key, "an array")
                arrays.append((address(array), name, array))
                regions.append((address(array), array.ctypes.data, array.nbytes, name, not array.flags.writeable))
        if schedule is None:
            schedule = "in order" if seed == 0 else "random" if seed % 2 else "adversarial"
        extents = _three(grid), _three(block)
        finish = None
        if watch is not None:
            name = self._native.name(kernel)
            finish = watch(Launch(self, name, *extents, shared_bytes, bytes(packed), arrays, undefined))
        try:
            found = self._native.launch(
                kernel, *extents, shared_bytes, bytes(packed), regions, seed, copies, schedule, check_races, threads,
                limit,
            )  # fmt: skip
        except EmulatorError as error:
            if finish is not None:
                finish(error)
            raise
        for which in ("global_read", "global_write"):
            found[which] = Traffic(*found[which])
        report = Report(**found)
        if finish is not None:
            finish(report)
        return report


def instruction_rows() -> list[str]:
    """What the emulator knows: opcodes with the families of their types, "add us", "add f"."""
    return native.instruction_rows()


def load(ptx: str) -> Module:
    """A module from PTX. Unknown instructions are errors that quote their line."""
    return Module(ptx)
