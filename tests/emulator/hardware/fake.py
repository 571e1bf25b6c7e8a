"""A Driver without a GPU: the emulator itself, with other addresses, another schedule and copies that land at once.

What differs between this and the first run is what no PTX program may rely on, so a test whose launches differ here
would differ on a GPU too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..build import EmulatorError, native
from ..tensor_map import LAYOUT, MAGIC
from .driver import DriverError, TensorMap

_FIRST_WINDOW = 3000  # below those of arrays, above those of variables
_START = 0x7EF000
_ELEMENT_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4)  # by CUtensorMapDataType
_ELEMENT = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 7, 7, 7)
_FTZ = (10, 12)


class FakeDriver:
    name = "the emulator in the place of a GPU"
    version = 13000

    def __init__(self, capability: int = 90) -> None:
        self.capability = capability
        self._memory: dict[int, np.ndarray] = {}
        self._modules: list[native.Module] = []
        self._next = _FIRST_WINDOW

    def load(self, ptx: str) -> native.Module:
        module = native.Module(ptx)
        self._modules.append(module)
        return module

    def unload(self, module: native.Module) -> None:
        self._modules.remove(module)

    def variable(self, module: native.Module, name: str) -> tuple[int, int] | None:
        for known, address, count in module.variables():
            if known == name:
                # Modules share these addresses: it is the module that was asked last.
                self._memory[address] = np.frombuffer(module.variable(name) if count else b"", np.uint8)
                return address, count
        return None

    def allocate(self, count: int) -> int:
        address = (self._next << 40) + _START * 256
        self._next += 1
        self._memory[address] = np.full(count, 0x5A, np.uint8)
        return address

    def free(self, address: int) -> None:
        del self._memory[address]

    def _find(self, address: int, count: int) -> np.ndarray:
        for start, data in self._memory.items():
            if start <= address and address + count <= start + len(data):
                return data[address - start : address - start + count]
        raise DriverError("CUDA_ERROR_INVALID_VALUE", f"no memory of {count} bytes at {address:#x}")

    def write(self, address: int, data: bytes) -> None:
        self._find(address, len(data))[:] = np.frombuffer(data, np.uint8)

    def read(self, address: int, count: int) -> bytes:
        return self._find(address, count).tobytes()

    def tensor_map(self, what: TensorMap) -> bytes:
        def padded(values: Sequence[int], count: int) -> list[int]:
            return [*values, *[1] * (count - len(values))]

        kind = what.data_type
        return LAYOUT.pack(
            MAGIC, _ELEMENT_BYTES[kind], len(what.size), what.swizzle, what.fill_nan, _ELEMENT[kind], kind in _FTZ,
            kind, what.address, *padded(what.size, 5), *padded(what.strides, 4), *padded(what.box, 5),
            *padded(what.steps, 5),
        ).ljust(128, b"\0")  # fmt: skip

    def run(
        self,
        module: native.Module,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        shared_bytes: int,
        parameters: bytes,
    ) -> None:
        regions = [
            (start, data.ctypes.data, len(data), "device memory", False)
            for start, data in self._memory.items()
            if start >> 40 >= _FIRST_WINDOW
        ]
        try:
            module.launch(
                kernel, tuple(grid), tuple(block), shared_bytes, parameters, regions, 3, "early", "random", False, 1,
                2_000_000_000,
            )  # fmt: skip
        except EmulatorError as error:
            names = {"assertion failed": "CUDA_ERROR_ASSERT", "trap": "CUDA_ERROR_LAUNCH_FAILED"}
            text = str(error)
            raise DriverError(
                names.get(text.split("\n")[0].split(":")[0], "CUDA_ERROR_ILLEGAL_ADDRESS"), text
            ) from None
