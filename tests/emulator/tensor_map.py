"""Tensor maps, with the rules of the driver's cuTensorMapEncodeTiled (cuda.h); their layout is the emulator's own."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from .module import address

SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
_ELEMENTS = ["u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16"]  # kElementTypes of tensor_map.h
_STORED_AS = {"f32_ftz": "f32", "tf32": "f32", "tf32_ftz": "f32"}
_PACKED = ("16u4_align8b", "16u4_align16b", "16u6_align16b")
LAYOUT = struct.Struct("<I7B5xQ5Q4Q5H5B")  # TensorMap of tensor_map.h
MAGIC = 0x54454E53
DATA_TYPES = (*_ELEMENTS, *_STORED_AS)  # as CUtensorMapDataType, without the packed ones


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
    interleave: str = "none",
) -> bytes:
    """128 bytes to pass as a `const __grid_constant__ CUtensorMap` argument.

    dtype: one of DATA_TYPES; tf32 copies its bits as they are. size, box: elements, innermost first. strides: bytes of
    dimensions 1 and up. element_strides: that of dimension 0 is ignored, as by the driver. fill_nan: elements out of
    range are NaN instead of 0. offset: bytes from the array's start.
    Raises ValueError where the driver returns CUDA_ERROR_INVALID_VALUE, and for what is not modelled.
    """
    rank = len(size)
    steps = list(element_strides or [1] * rank)
    start = address(array) + offset

    def need(truth: bool, what: str) -> None:
        if not truth:
            raise ValueError(f"tensor map: {what}")

    need(dtype not in _PACKED, f"packed elements are not modelled: {dtype}")
    need(dtype in DATA_TYPES, f"unknown element type {dtype}")
    need(interleave in ("none", "16B", "32B"), f"unknown interleave {interleave}")
    need(swizzle in SWIZZLES, f"unknown swizzle, or one of later architectures: {swizzle}")
    element = _STORED_AS.get(dtype, dtype)
    bytes_ = int(element.strip("bfsu")) // 8
    need(1 <= rank <= 5, "1 to 5 dimensions")
    need(
        len(strides) == rank - 1 and len(box) == rank and len(steps) == rank,
        "one stride less than dimensions, a box of all",
    )
    if interleave != "none":
        need(rank >= 3, "interleaved layouts have at least 3 dimensions")
        if interleave == "32B":
            need(start % 32 == 0, "the address must be a multiple of 32 when interleaved by 32 bytes")
            need(all(one % 32 == 0 for one in strides), "strides are multiples of 32 when interleaved by 32 bytes")
            need(swizzle == "32B", "the swizzle is 32B when interleaved by 32 bytes")
        need(False, "interleaved layouts are not modelled")
    need(start % 16 == 0, "the address must be a multiple of 16")
    need(all(1 <= one <= 1 << 32 for one in size), "sizes are 1 to 2^32")
    need(all(one % 16 == 0 and 0 <= one < 1 << 40 for one in strides), "strides are multiples of 16 below 2^40")
    need(all(1 <= one <= 256 for one in box), "box sizes are 1 to 256")
    need(all(1 <= one <= 8 for one in steps), "element strides are 1 to 8")
    inner = box[0] * bytes_
    need(inner % 16 == 0, "the inner box must be a multiple of 16 bytes")
    mode = SWIZZLES[swizzle]
    need(not mode or inner <= 16 << mode, f"the inner box must not be wider than the swizzle, {16 << mode} bytes")
    need(not fill_nan or "f" in dtype, "NaN fill is for floats")

    def padded(values: Sequence[int], count: int) -> list[int]:
        return [*values, *[1] * (count - len(values))]

    packed = LAYOUT.pack(
        MAGIC, bytes_, rank, mode, fill_nan, _ELEMENTS.index(element), dtype.endswith("_ftz"),
        DATA_TYPES.index(dtype), start,
        *padded(size, 5), *padded(strides, 4), *padded(box, 5), *padded(steps, 5),
    )  # fmt: skip
    return packed.ljust(128, b"\0")
