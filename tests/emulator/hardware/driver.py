"""The CUDA driver by ctypes: what it takes to load PTX, place memory, launch and read back. Nothing else is wrapped.

A Driver is what job.py works with: this one, or the one of fake.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class NoDriver(RuntimeError):
    """There is no CUDA driver, or no GPU."""


class DriverError(RuntimeError):
    """A call of the driver failed; name: "CUDA_ERROR_..."."""

    def __init__(self, name: str, text: str = "") -> None:
        super().__init__(f"{name}: {text}" if text else name)
        self.name = name


@dataclass(frozen=True)
class TensorMap:
    """The arguments of cuTensorMapEncodeTiled; enumerators as numbers of cuda.h."""

    data_type: int
    address: int
    size: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    swizzle: int
    fill_nan: int


class Driver(Protocol):
    """One GPU. Addresses are those of its memory."""

    name: str
    capability: int  # 90
    version: int  # 13000

    def load(self, ptx: str) -> Any: ...
    def unload(self, module: Any) -> None: ...
    def variable(self, module: Any, name: str) -> tuple[int, int] | None:
        """Address and bytes of a variable; None if it is not exported."""

    def allocate(self, count: int) -> int: ...
    def free(self, address: int) -> None: ...
    def write(self, address: int, data: bytes) -> None: ...
    def read(self, address: int, count: int) -> bytes: ...
    def tensor_map(self, what: TensorMap) -> bytes: ...
    def run(
        self, module: Any, kernel: str, grid: Sequence[int], block: Sequence[int], shared_bytes: int, parameters: bytes
    ) -> None:
        """Launches and waits. After an error the process has to end: nothing else works any more."""


# As in cuda.h, without names of parameters.
PROTOTYPES = {
    "cuInit": "unsigned int",
    "cuDriverGetVersion": "int *",
    "cuGetErrorName": "CUresult, const char **",
    "cuGetErrorString": "CUresult, const char **",
    "cuDeviceGet": "CUdevice *, int",
    "cuDeviceGetName": "char *, int, CUdevice",
    "cuDeviceGetAttribute": "int *, CUdevice_attribute, CUdevice",
    "cuDevicePrimaryCtxRetain": "CUcontext *, CUdevice",
    "cuCtxSetCurrent": "CUcontext",
    "cuCtxSetLimit": "CUlimit, size_t",
    "cuCtxSynchronize": "void",
    "cuModuleLoadDataEx": "CUmodule *, const void *, unsigned int, CUjit_option *, void **",
    "cuModuleUnload": "CUmodule",
    "cuModuleGetFunction": "CUfunction *, CUmodule, const char *",
    "cuModuleGetGlobal_v2": "CUdeviceptr *, size_t *, CUmodule, const char *",
    "cuFuncSetAttribute": "CUfunction, CUfunction_attribute, int",
    "cuMemAlloc_v2": "CUdeviceptr *, size_t",
    "cuMemFree_v2": "CUdeviceptr",
    "cuMemcpyHtoD_v2": "CUdeviceptr, const void *, size_t",
    "cuMemcpyDtoH_v2": "void *, CUdeviceptr, size_t",
    "cuLaunchKernel": "CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, "
    "unsigned int, CUstream, void **, void **",
    "cuTensorMapEncodeTiled": "CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, "
    "const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, "
    "CUtensorMapL2promotion, CUtensorMapFloatOOBfill",
}
_HANDLES = ("CUcontext", "CUmodule", "CUfunction", "CUstream")
_NUMBERS = {
    "unsigned int": ctypes.c_uint,
    "cuuint32_t": ctypes.c_uint32,
    "size_t": ctypes.c_size_t,
    "CUdeviceptr": ctypes.c_uint64,
}
# Of cuda.h.
COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76
ERROR_LOG_BUFFER, ERROR_LOG_BUFFER_SIZE_BYTES = 5, 6
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
PARAM_END, PARAM_BUFFER_POINTER, PARAM_BUFFER_SIZE = 0, 1, 2
CUDA_ERROR_NOT_FOUND = 500
LIMIT_STACK_SIZE = 0
LOG_BYTES = 1 << 16
STACK_BYTES = 16 << 10  # of each thread, for kernels that recurse


def argument_types(prototype: str) -> list[Any]:
    """What ctypes calls them: pointers and handles are void *, enumerations and CUdevice are int."""
    names = [one.strip() for one in prototype.split(",") if one.strip() != "void"]
    return [ctypes.c_void_p if "*" in one or one in _HANDLES else _NUMBERS.get(one, ctypes.c_int) for one in names]


class CudaDriver:
    """Driver over libcuda.so.1 and its first GPU, in the primary context."""

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            self._cuda = ctypes.CDLL(library)
        except OSError as error:
            raise NoDriver(f"no CUDA driver: {error}") from None
        for name, prototype in PROTOTYPES.items():
            getattr(self._cuda, name).argtypes = argument_types(prototype)
            getattr(self._cuda, name).restype = ctypes.c_int
        device, context, number, text = (
            ctypes.c_int(),
            ctypes.c_void_p(),
            ctypes.c_int(),
            ctypes.create_string_buffer(256),
        )
        try:
            self._call("cuInit", 0)
            self._call("cuDeviceGet", ctypes.byref(device), 0)
            self._call("cuDeviceGetName", text, len(text), device)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        except DriverError as error:
            raise NoDriver(f"no CUDA GPU: {error}") from None
        self._call("cuCtxSetCurrent", context)
        self._call("cuCtxSetLimit", LIMIT_STACK_SIZE, STACK_BYTES)
        self.name = text.value.decode()
        parts = []
        for attribute in (COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR):
            self._call("cuDeviceGetAttribute", ctypes.byref(number), attribute, device)
            parts.append(number.value)
        self.capability = 10 * parts[0] + parts[1]
        self._call("cuDriverGetVersion", ctypes.byref(number))
        self.version = number.value

    def _call(self, function: str, *arguments: Any, log: Any = None) -> None:
        code = getattr(self._cuda, function)(*arguments)
        if code:
            name, text = ctypes.c_char_p(), ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(name))
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            words = [f"{function}: {(text.value or b'').decode()}", log.value.decode() if log is not None else ""]
            raise DriverError((name.value or str(code).encode()).decode(), "\n".join(word for word in words if word))

    def load(self, ptx: str) -> ctypes.c_void_p:
        module, log = ctypes.c_void_p(), ctypes.create_string_buffer(LOG_BYTES)
        options = (ctypes.c_int * 2)(ERROR_LOG_BUFFER, ERROR_LOG_BUFFER_SIZE_BYTES)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), LOG_BYTES)
        text = ptx.encode() + b"\0"
        self._call("cuModuleLoadDataEx", ctypes.byref(module), text, 2, options, values, log=log)
        return module

    def unload(self, module: ctypes.c_void_p) -> None:
        self._call("cuModuleUnload", module)

    def variable(self, module: ctypes.c_void_p, name: str) -> tuple[int, int] | None:
        address, count = ctypes.c_uint64(), ctypes.c_size_t()
        code = self._cuda.cuModuleGetGlobal_v2(
            ctypes.byref(address), ctypes.byref(count), module, name.encode() + b"\0"
        )
        return None if code == CUDA_ERROR_NOT_FOUND else (address.value, count.value)

    def allocate(self, count: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), max(count, 1))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def write(self, address: int, data: bytes) -> None:
        if data:
            self._call("cuMemcpyHtoD_v2", address, data, len(data))

    def read(self, address: int, count: int) -> bytes:
        if not count:
            return b""
        room = ctypes.create_string_buffer(count)
        self._call("cuMemcpyDtoH_v2", room, address, count)
        return room.raw

    def tensor_map(self, what: TensorMap) -> bytes:
        room = ctypes.create_string_buffer(128 + 64)  # the driver wants a multiple of 64
        skip = -ctypes.addressof(room) % 64
        rank = len(what.size)
        size, strides = (ctypes.c_uint64 * 5)(*what.size), (ctypes.c_uint64 * 5)(*what.strides)
        box, steps = (ctypes.c_uint32 * 5)(*what.box), (ctypes.c_uint32 * 5)(*what.steps)
        self._call(
            "cuTensorMapEncodeTiled", ctypes.addressof(room) + skip, what.data_type, rank, what.address, size, strides,
            box, steps, 0, what.swizzle, 0, what.fill_nan,
        )  # fmt: skip
        return room.raw[skip : skip + 128]

    def run(
        self,
        module: ctypes.c_void_p,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        shared_bytes: int,
        parameters: bytes,
    ) -> None:
        function = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode() + b"\0")
        self._call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        room, count = ctypes.create_string_buffer(parameters, len(parameters) + 1), ctypes.c_size_t(len(parameters))
        extra = (ctypes.c_void_p * 5)(
            PARAM_BUFFER_POINTER, ctypes.addressof(room), PARAM_BUFFER_SIZE, ctypes.addressof(count), PARAM_END
        )
        self._call("cuLaunchKernel", function, *grid, *block, shared_bytes, None, None, extra if parameters else None)
        self._call("cuCtxSynchronize")
