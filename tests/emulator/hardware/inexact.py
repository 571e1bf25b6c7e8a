"""What of the emulator's results a GPU may give otherwise: one table, with the reason and where the PTX ISA says so.

A launch is judged by the forms of instructions that it executed ("ex2.approx.ftz.f32"). Bounds are those of the manual;
the emulator itself rounds the exact value, which may add half a unit in the last place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Bound:
    """Results lie within the sum of these of the exact value."""

    ulps: float = 0.0
    relative: float = 0.0
    absolute: float = 0.0


@dataclass(frozen=True)
class Inexact:
    forms: str  # a regular expression that matches whole forms
    why: str
    section: str
    bound: Bound | None = None  # None: the manual gives none; results are compared as in compare.loosely


def _function(forms: str, section: str, bound: Bound | None) -> Inexact:
    return Inexact(forms, "approximation", section, bound)


# Sections are those of PTX ISA 9.0.
INEXACT = [
    _function(r"rcp\.approx(\.ftz)?\.f32", "9.7.3.13 rcp", Bound(ulps=1)),
    _function(r"rcp\.approx\.ftz\.f64", "9.7.3.14 rcp.approx.ftz.f64", Bound(relative=2**-20)),
    _function(r"sqrt\.approx(\.ftz)?\.f32", "9.7.3.15 sqrt", Bound(relative=2**-23)),
    _function(r"rsqrt\.approx(\.ftz)?\.f32", "9.7.3.16 rsqrt", Bound(relative=2**-22.9)),
    _function(r"rsqrt\.approx\.f64", "9.7.3.16 rsqrt", None),  # given for f32 alone
    _function(r"rsqrt\.approx\.ftz\.f64", "9.7.3.17 rsqrt.approx.ftz.f64", Bound(relative=2**-20)),
    # Within [-2 pi, 2 pi]; 2^-14.7 up to 100 pi, which no test here reaches.
    _function(r"(sin|cos)\.approx(\.ftz)?\.f32", "9.7.3.18 sin, 9.7.3.19 cos", Bound(absolute=2**-20.5)),
    # Absolute between 1/2 and 2, relative outside.
    _function(r"lg2\.approx(\.ftz)?\.f32", "9.7.3.20 lg2", Bound(relative=2**-22, absolute=2**-22)),
    _function(r"ex2\.approx(\.ftz)?\.f32", "9.7.3.21 ex2", Bound(ulps=2)),
    _function(r"tanh\.approx\.f32", "9.7.3.22 tanh", Bound(relative=2**-11)),
    _function(r"tanh\.approx\.f16(x2)?", "9.7.4.9 tanh", Bound(absolute=2**-10.987)),
    _function(r"tanh\.approx\.bf16(x2)?", "9.7.4.9 tanh", Bound(absolute=2**-8)),
    _function(r"ex2\.approx(\.ftz)?\.f16(x2)?", "9.7.4.10 ex2", Bound(relative=2**-9.9)),
    _function(r"ex2\.approx\.ftz\.bf16(x2)?", "9.7.4.10 ex2", Bound(relative=2**-7)),
    _function(r"div\.(approx|full)(\.ftz)?\.f32", "9.7.3.8 div", Bound(ulps=2)),
    Inexact(
        r"wgmma\.mma_async\..*|mma\..*\.(f16|f32|f64)",
        "the order and the rounding of the sums of a matrix product are not defined",
        "warp level matrix instructions: mma; asynchronous warpgroup level ones: wgmma.mma_async",
    ),
    Inexact(
        r"(red|atom)\..*\.add(\..*)?\.b?f(16|32|64)(x2)?",
        "floats are added in the order in which threads come",
        "parallel synchronization and communication: atom, red; memory consistency model",
    ),
    Inexact(
        r"cp\.reduce\.async\.bulk\..*\.add(\..*)?",
        "what copies add is added in the order in which they come",
        "data movement and conversion: cp.reduce.async.bulk",
    ),
]
# mul and add without a rounding mode, in any type of float.
_FUSED_PRODUCT = re.compile(r"mul(\.ftz)?(\.sat)?\.(f16|bf16|f32|f64)(x2)?")
_FUSED_SUM = re.compile(r"(add|sub)(\.ftz)?(\.sat)?\.(f16|bf16|f32|f64)(x2)?")
FUSED = Inexact(
    "mul and add, sub",
    "a product and a sum without a rounding mode may become one fma",
    "9.7.3.3 add, 9.7.3.4 sub, 9.7.3.5 mul",
)


@dataclass(frozen=True)
class Undefined:
    """If bits differ in a launch that executed such a form, it is left out for this reason."""

    forms: str
    why: str
    section: str


UNDEFINED = [
    Undefined(r".* %(clock|clock64|globaltimer)\b.*", "reads a clock", "special registers"),
    Undefined(r".* %(smid|nsmid|gridid)\b.*", "reads where or when it runs", "special registers"),
    Undefined(r".* %(warpid|nwarpid)\b.*", "reads %warpid, which may change", "special registers"),
    Undefined(r".* %total_smem_size\b.*", "the granularity of shared memory is the GPU's", "special registers"),
    Undefined(
        r"activemask\..*",
        "which lanes are together is not defined",
        "parallel synchronization and communication: activemask",
    ),
    Undefined(r"createpolicy\..*", "a cache policy is opaque", "data movement and conversion: createpolicy"),
    Undefined(
        r"elect\..*", "which lane is elected is not defined", "parallel synchronization and communication: elect.sync"
    ),
]


def inexact(forms: set[str]) -> list[Inexact]:
    """The rows of INEXACT that a launch with these forms needs, and FUSED."""
    found = [row for row in INEXACT if any(re.fullmatch(row.forms, form) for form in forms)]
    if any(map(_FUSED_PRODUCT.fullmatch, forms)) and any(map(_FUSED_SUM.fullmatch, forms)):
        found.append(FUSED)
    return found


def undefined(forms: set[str]) -> str:
    """Why the results of a launch with these forms may differ; "" if they may not."""
    return "; ".join(row.why for row in UNDEFINED if any(re.fullmatch(row.forms, form) for form in forms))


_ARITHMETIC = re.compile(r"(\S+ (f|hx))|(cvt|mma|wgmma|atom|red) ")


def arithmetic(forms: set[str], rows: dict[str, str]) -> set[str]:
    """Those that compute or convert floats; rows: of the instruction table, by form."""
    found = {form for form in forms if _ARITHMETIC.fullmatch(rows.get(form, "")) or form.startswith("cp.reduce")}
    return {form for form in found if float_types({form})}


def float_types(forms: set[str]) -> set[str]:
    """The types that these forms round floats to: f16, bf16, f32, f64; fp8 for matrix products of 8-bit floats, whose
    sums may have fewer bits than their type. What goes into a matrix product is not rounded."""
    found: set[str] = set()
    for form in forms:
        names = re.findall(r"\b(b?f16|t?f32|f64)(?:x2)?\b", form)
        if form.startswith(("mma", "wgmma")):
            names = [*names[:1], *["fp8" for _ in re.findall(r"\be[45]m[23]\b", form)]]
        found |= {name.replace("tf32", "f32") for name in names}
    return found


def alone(computing: set[str], found: list[Inexact]) -> bool:
    """Whether the inexact forms are the only arithmetic, so that their bounds are those of the results."""
    if not found or any(row.bound is None for row in found):
        return False
    return all(any(re.fullmatch(row.forms, form) for row in found) for form in computing)
