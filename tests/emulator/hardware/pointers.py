"""Addresses of the emulator and of a GPU: words that point into memory, and tensor maps, from one to the other.

A word of 64 bits at a multiple of 8 bytes is a pointer if it lies in a region of the emulated memory or one byte behind
it. Regions are 2^40 bytes apart from 2^52 on (those of variables from 2^40 on), so that numbers hardly look like it:
it takes a double below 1e-300, or two 32-bit numbers that both are about 2^20.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import numpy as np

from ..tensor_map import LAYOUT, MAGIC
from .driver import TensorMap

MAP_BYTES = 128
_MAGIC = struct.pack("<I", MAGIC)


@dataclass(frozen=True)
class Place:
    """A region of memory: where the emulator has it, and where the GPU has it."""

    emulated: int
    device: int
    count: int  # bytes


def _words(data: bytes | bytearray) -> np.ndarray:
    return np.frombuffer(data, np.uint64, len(data) // 8)


def pointers(data: bytes, places: list[Place]) -> list[tuple[int, Place]]:
    """(byte offset, where it points to) of every emulated pointer in `data`."""
    words = _words(data)
    likely = np.nonzero((words >> np.uint64(40) != 0) & (words >> np.uint64(56) == 0))[0]
    found = []
    for i in likely.tolist() if places else []:
        word = int(words[i])
        for place in places:
            if place.emulated <= word <= place.emulated + place.count:
                found.append((8 * i, place))
    return found


def functions(data: bytes) -> list[int]:
    """Byte offsets of the emulator's addresses of functions, 16 bytes apart from 4 * 2^56 on."""
    words = _words(data) - np.uint64(4 << 56)
    return (8 * np.nonzero((words > 0) & (words < 1 << 20) & (words % 16 == 0))[0]).tolist()


def to_device(data: bytes, places: list[Place]) -> bytes:
    """`data` with its emulated pointers as those of the GPU."""
    moved = bytearray(data)
    for offset, place in pointers(data, places):
        (word,) = struct.unpack_from("<Q", data, offset)
        struct.pack_into("<Q", moved, offset, word - place.emulated + place.device)
    return bytes(moved)


def from_device(data: bytes, expected: bytes, places: list[Place]) -> bytes:
    """`data` of the GPU with its pointers as the emulator's, wherever `expected`, the emulator's own, has one."""
    moved = bytearray(data)
    for offset, _ in pointers(expected, places):
        (word,) = struct.unpack_from("<Q", data, offset)
        for place in places:
            if place.device <= word <= place.device + place.count:
                struct.pack_into("<Q", moved, offset, word - place.device + place.emulated)
    for at, _ in tensor_maps(expected):  # the driver's are opaque
        moved[at : at + MAP_BYTES] = expected[at : at + MAP_BYTES]
    return bytes(moved)


def tensor_maps(data: bytes) -> list[tuple[int, TensorMap]]:
    """(byte offset, contents) of the emulator's tensor maps in `data`."""
    found = []
    at = data.find(_MAGIC)
    while at >= 0:
        if at % 64 == 0 and at + MAP_BYTES <= len(data):
            found.append((at, decode_map(data[at : at + MAP_BYTES])))
        at = data.find(_MAGIC, at + 1)
    return found


def decode_map(data: bytes) -> TensorMap:
    _, _, rank, swizzle, fill_nan, _, _, data_type, address, *rest = LAYOUT.unpack_from(data)
    size, strides, box, steps = rest[:rank], rest[5 : 4 + rank], rest[9 : 9 + rank], rest[14 : 14 + rank]
    return TensorMap(data_type, address, tuple(size), tuple(strides), tuple(box), tuple(steps), swizzle, fill_nan)


def moved_map(what: TensorMap, places: list[Place]) -> TensorMap:
    for place in places:
        if place.emulated <= what.address <= place.emulated + place.count:
            return replace(what, address=what.address - place.emulated + place.device)
    raise ValueError(f"a tensor map of nothing that is there: {what}")
