"""Tensor maps, with the rules of the driver's cuTensorMapEncodeTiled; their layout is the emulator's own."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from .module import address

SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
_KINDS = ["f32", "f16", "bf16", "u32", "s32", "u64", "s64", "f64"]  # as in instructions/bulk.cpp
_BYTES = {"u8": 1, "u16": 2, "f16": 2, "bf16": 2, "u32": 4, "s32": 4, "f32": 4, "tf32": 4, "u64": 8, "s64": 8, "f64": 8}


def encode_tiled(
    array: np.ndarray,
    dtype: str,
    size: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    element_strides: Sequence[int] | None = None,
    swizzle: str = "none",
    fill_nan: bool = False,
    offset: int = 0,
) -> bytes:
    """128 bytes to pass as a `const __grid_constant__ CUtensorMap` argument.

    size, box: elements, innermost first. strides: bytes of dimensions 1 and up. offset: bytes from the array's start.
    Raises ValueError where the driver returns CUDA_ERROR_INVALID_VALUE.
    """
    rank, bytes_ = len(size), _BYTES[dtype]
    steps = list(element_strides or [1] * rank)
    start = address(array) + offset

    def need(truth: bool, what: str) -> None:
        if not truth:
            raise ValueError(f"tensor map: {what}")

    need(1 <= rank <= 5, "1 to 5 dimensions")
    need(
        len(strides) == rank - 1 and len(box) == rank and len(steps) == rank,
        "one stride less than dimensions, a box of all",
    )
    need(start % 16 == 0, "the address must be a multiple of 16")
    need(all(1 <= one <= 1 << 32 for one in size), "sizes are 1 to 2^32")
    need(all(one % 16 == 0 and 0 <= one < 1 << 40 for one in strides), "strides are multiples of 16 below 2^40")
    need(all(1 <= one <= 256 for one in box), "box sizes are 1 to 256")
    need(all(1 <= one <= 8 for one in steps), "element strides are 1 to 8")
    inner = -(-box[0] // steps[0]) * bytes_
    need(inner % 16 == 0, "the inner box must be a multiple of 16 bytes")
    mode = SWIZZLES[swizzle]
    need(not mode or inner <= 16 << mode, f"the inner box must not be wider than the swizzle, {16 << mode} bytes")
    need(not fill_nan or dtype in ("f16", "bf16", "f32", "tf32", "f64"), "NaN fill is for floats")
    need(not fill_nan, "NaN fill is not modelled")

    def padded(values: Sequence[int], count: int) -> list[int]:
        return [*values, *[1] * (count - len(values))]

    kind = _KINDS.index("f32" if dtype == "tf32" else dtype) if dtype in _KINDS or dtype == "tf32" else 255
    packed = struct.pack(
        "<I4BB7xQ5Q4Q5H5B",
        0x54454E53, bytes_, rank, mode, fill_nan, kind, start, *padded(size, 5), *padded(strides, 4), *padded(box, 5),
        *padded(steps, 5),
    )  # fmt: skip
    return packed.ljust(128, b"\0")
