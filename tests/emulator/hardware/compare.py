"""The memory that the emulator left against that of a GPU: bit for bit, or as far as the table of inexact.py allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .inexact import Bound

DIGITS = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52}  # of the mantissa
_SMALLEST = {"f16": -14, "bf16": -126, "f32": -126, "f64": -1022}  # exponent of the smallest normal number
_BYTES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}
# Norm of the differences over norm of the results, where sums have no defined order: see loosely.
LOOSE = {"bf16": 2.0**-7, "f16": 2.0**-10, "fp8": 2.0**-12, "f32": 2.0**-19, "f64": 2.0**-48}

# (the emulator's values, the GPU's, the type they are read as) -> which elements may be so.
Judge = Callable[[np.ndarray, np.ndarray, str], np.ndarray]


@dataclass(frozen=True)
class Difference:
    """Elements of a region that the GPU must not have given, in the words that the region is made of."""

    region: str
    count: int
    elements: int  # of the region
    index: int  # of the first one
    emulated: str  # its bits
    hardware: str

    def __str__(self) -> str:
        return (
            f"{self.region}[{self.index}]: emulator {self.emulated}, hardware {self.hardware}; "
            f"{self.count} of {self.elements} elements differ"
        )


def decode(data: bytes, form: str) -> np.ndarray:
    """The values, as doubles; without the bytes behind the last whole one."""
    whole = data[: len(data) // _BYTES[form] * _BYTES[form]]
    if form == "bf16":
        return (np.frombuffer(whole, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.frombuffer(whole, {"f16": np.float16, "f32": np.float32, "f64": np.float64}[form]).astype(np.float64)


def ulp(x: np.ndarray, form: str) -> np.ndarray:
    """The unit in the last place of each finite x."""
    _, exponents = np.frexp(np.where(np.isfinite(x), x, 0.0))
    exponents = np.where(x == 0, _SMALLEST[form], np.maximum(exponents - 1, _SMALLEST[form]))
    return np.ldexp(1.0, exponents - DIGITS[form])


def both_nan(emulated: np.ndarray, hardware: np.ndarray, form: str) -> np.ndarray:
    return np.isnan(emulated) & np.isnan(hardware)


def within(bound: Bound) -> Judge:
    """Elements within a documented bound, and what the emulator itself is off."""

    def judge(emulated: np.ndarray, hardware: np.ndarray, form: str) -> np.ndarray:
        with np.errstate(invalid="ignore"):
            allowed = (bound.ulps + 1) * ulp(emulated, form) + bound.relative * abs(emulated) + bound.absolute
            return abs(hardware - emulated) <= allowed

    return judge


def loosely(types: set[str]) -> Judge:
    """All elements or none: the norm of the difference is at most LOOSE times that of the results, for the coarsest
    type that takes part; none is further off than 16 times as much of the largest one; and what is not finite agrees.

    No documented bound: sums in another order are as exact, and one step of approximation more or less at a place where
    numbers are rounded to a narrower type moves a result by a unit of that type.
    """

    def judge(emulated: np.ndarray, hardware: np.ndarray, form: str) -> np.ndarray:
        finite = np.isfinite(emulated) & np.isfinite(hardware)
        alike = finite | (emulated == hardware) | both_nan(emulated, hardware, form)
        a, b = np.where(finite, emulated, 0.0), np.where(finite, hardware, 0.0)
        limit = max(LOOSE[one] for one in types | {form})
        off = abs(a - b)
        good = (
            bool(alike.all())
            and np.linalg.norm(off) <= limit * np.linalg.norm(a)
            and off.max(initial=0.0) <= 16 * limit * abs(a).max(initial=0.0)
        )
        return np.full(len(emulated), good)

    return judge


def _forms_of(dtype: str, types: set[str]) -> Iterator[str]:
    """How a region may be read: as its numpy type says, if that is a float; else as the types of its width that took
    part, or as several of a narrower one in each element. Bytes are read as a type only if no other took part."""
    kind = np.dtype(dtype or np.uint8)
    known = types & set(DIGITS)
    if kind.kind == "f":
        yield from known & {f"f{8 * kind.itemsize}"}
    elif kind.itemsize == 1:
        yield from known if len(known) == 1 else ()
    else:
        widths = {_BYTES[one] for one in known if _BYTES[one] <= kind.itemsize}
        yield from sorted(one for one in known if _BYTES[one] == max(widths))


def compare(
    region: str,
    emulated: bytes,
    hardware: bytes,
    dtype: str,
    types: set[str],
    judges: Sequence[Judge],
) -> Difference | None:
    """What is left over: bytes that differ, and that no judge lets pass in any way of reading the region."""
    if emulated == hardware:
        return None
    bad = np.frombuffer(emulated, np.uint8) != np.frombuffer(hardware, np.uint8)
    for form in _forms_of(dtype, types):
        a, b = decode(emulated, form), decode(hardware, form)
        for judge in judges:
            passes = np.repeat(judge(a, b, form), _BYTES[form])
            bad[: len(passes)] &= ~passes
    if not bad.any():
        return None
    size = np.dtype(dtype).itemsize if dtype else 1
    size = size if size and len(emulated) % size == 0 else 1
    rows = np.nonzero(bad.reshape(-1, size).any(axis=1))[0]
    first = int(rows[0]) * size
    bits = [f"0x{one[first : first + size][::-1].hex()}" for one in (emulated, hardware)]
    return Difference(region, len(rows), len(emulated) // size, int(rows[0]), *bits)
