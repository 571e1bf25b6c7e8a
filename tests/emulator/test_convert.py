"""Conversions between integers, floats and the narrow float formats, rounded as they say."""

# ruff: noqa: E501 PTX texts

import math
from fractions import Fraction

import numpy as np
import pytest

from emulator.instruction_runner import INTEGER_TYPES, bits_of, execute, floats, integers, to_code, to_number, wrap


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("to", ["f32", "f64"])
@pytest.mark.parametrize("source", ["u32", "s32", "u64", "s64", "s16"])
def test_integer_to_float(source, to, mode):
    x = integers(source, 3)
    got = execute(f"cvt.{mode}.{to}.{source} d, a;", to, (source, x))
    assert got.tolist() == [to_code(Fraction(int(v)), to, mode) for v in x]


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("to", ["u32", "s32", "u64", "s64", "s16", "u8"])
@pytest.mark.parametrize("source", ["f32", "f64", "f16"])
def test_float_to_integer(source, to, mode):
    x = floats(source, 4)
    d = "u16" if to == "u8" else to
    got = execute(f"cvt.{mode}.{to}.{source} d, a;", d, (source, x))
    n = bits_of(to)
    low, high = (-(1 << n - 1), (1 << n - 1) - 1) if to[0] == "s" else (0, (1 << n) - 1)
    for code, word in zip(x, got, strict=True):
        v = to_number(int(code), source)
        if isinstance(v, float) and math.isnan(v):
            continue
        if isinstance(v, float) and math.isinf(v):
            expected = high if v > 0 else low
        else:
            v = Fraction(v)
            whole = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode](v)
            expected = max(low, min(high, whole))
        assert int(word) == wrap(expected, bits_of(d) if to[0] == "s" else n), (v, mode)


@pytest.mark.parametrize("form, source, to, mode", [
    ("cvt.rn.bf16.f32", "f32", "bf16", "rn"), ("cvt.rz.bf16.f32", "f32", "bf16", "rz"), ("cvt.rn.f16.f32", "f32", "f16", "rn"),
    ("cvt.rz.f16.f32", "f32", "f16", "rz"), ("cvt.f32.f16", "f16", "f32", "rn"), ("cvt.f32.bf16", "bf16", "f32", "rn"),
    ("cvt.f64.f32", "f32", "f64", "rn"), ("cvt.rn.f32.f64", "f64", "f32", "rn"), ("cvt.rm.f32.f64", "f64", "f32", "rm"),
    ("cvt.rp.f32.f64", "f64", "f32", "rp"), ("cvt.rn.f16.f64", "f64", "f16", "rn"),
])  # fmt: skip
def test_float_to_float(form, source, to, mode):
    x = floats(source, 7)
    for code, word in zip(x, execute(f"{form} d, a;", to, (source, x)), strict=True):
        v = to_number(int(code), source)
        expected = to_code(v, to, mode)
        if expected is None:
            assert math.isnan(to_number(int(word), to))
        else:
            assert int(word) == expected, (v, hex(int(word)), hex(expected))


def test_tf32_and_packed():
    x, y = floats("f32", 8), floats("f32", 9)
    for code, word in zip(x, execute("cvt.rna.tf32.f32 d, a;", "f32", ("f32", x)), strict=True):
        expected = to_code(to_number(int(code), "f32"), "tf32", "rna")
        assert expected is None or int(word) == expected << 13
    for t in ("bf16", "f16"):
        got = execute(f"cvt.rn.{t}x2.f32 d, a, b;", "u32", ("f32", x), ("f32", y))
        for a, b, word in zip(x, y, got, strict=True):
            for code, part in ((a, int(word) >> 16), (b, int(word) & 0xFFFF)):
                expected = to_code(to_number(int(code), "f32"), t)
                assert expected is None or part == expected
        relu = execute(f"cvt.rn.relu.{t}x2.f32 d, a, b;", "u32", ("f32", x), ("f32", y))
        negative = x >> 31 == 1
        assert ((relu >> 16)[negative] == 0).all() and (relu >> 16 == got >> 16)[~negative].all()


@pytest.mark.parametrize("source, to", [(a, b) for a in INTEGER_TYPES for b in INTEGER_TYPES])
def test_integer_to_integer(source, to):
    x = integers(source, 11)
    n = bits_of(to)
    low, high = (-(1 << n - 1), (1 << n - 1) - 1) if to[0] == "s" else (0, (1 << n) - 1)
    assert execute(f"cvt.{to}.{source} d, a;", to, (source, x)).tolist() == [wrap(int(v), n) for v in x]
    assert execute(f"cvt.sat.{to}.{source} d, a;", to, (source, x)).tolist() == [
        wrap(max(low, min(high, int(v))), n) for v in x
    ]


def test_eight_bit_floats():
    """e4m3: bias 7, largest 448, no infinity; e5m2: bias 15, largest 57344. Exact values go there and back."""
    values = np.array(
        [0, 1, -1, 0.5, 448, -448, 2**-9, 1.75, 240, -0.0625, 1e9, 3] * 2
        + [1.0625, 1.1875, 17, 19, 0.001, 0.002, 100, 5],
        np.float32,
    )
    expected = {"e4m3x2": (448, 3, -6), "e5m2x2": (57344, 2, -14)}
    for t, (largest, bits, low) in expected.items():
        codes = execute(f"cvt.rn.satfinite.{t}.f32 d, a, b;", "u16", ("f32", values), ("f32", np.zeros(32, np.float32)))
        back = execute(f"cvt.rn.f16x2.{t} d, a;", "u32", ("u16", codes))
        for v, word in zip(values, back, strict=True):
            got = float(to_number(int(word) >> 16, "f16"))
            x = float(v)
            e = max(math.frexp(x)[1] - 1 if x else low, low)
            quantum = 2.0 ** (e - bits)
            assert got == max(-largest, min(largest, round(x / quantum) * quantum)), (t, x)
