"""setp with ordered and unordered floats, slct, testp."""

# ruff: noqa: E501 PTX texts

import numpy as np
import pytest

from emulator.instruction_runner import INTEGER_TYPES, execute, floats, integers


@pytest.mark.parametrize(
    "op", ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
)
def test_setp_float(op):
    x = np.array([1, 2, 2, np.nan, np.nan, 3, -0.0, np.inf] * 4, np.float32)
    y = np.array([2, 1, 2, 1, np.nan, np.nan, 0.0, np.inf] * 4, np.float32)
    got = execute(f"setp.{op}.f32 q|r, a, b; selp.b32 d, 1, 0, q; @r add.u32 d, d, 2;", "u32", ("f32", x), ("f32", y))
    unordered = np.isnan(x) | np.isnan(y)
    base = {"eq": x == y, "ne": (x != y) & ~unordered, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y}
    expected = (
        ~unordered
        if op == "num"
        else unordered
        if op == "nan"
        else base[op]
        if op in base
        else base[op[:-1]] | unordered
    )
    assert got.tolist() == np.where(expected, 1, 2).tolist()


@pytest.mark.parametrize("t", INTEGER_TYPES)
def test_setp_integer(t):
    a, b = integers(t, 1), integers(t, 2)
    b[::3] = a[::3]
    for op, f in {
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    }.items():
        got = execute(f"setp.{op}.{t} q, a, b; selp.u32 d, 7, 9, q;", "u32", (t, a), (t, b))
        assert got.tolist() == np.where(f(a, b), 7, 9).tolist()
    got = execute(f"setp.lt.{t} r, a, b; setp.eq.or.{t} q, a, b, r; selp.u32 d, 7, 9, q;", "u32", (t, a), (t, b))
    assert got.tolist() == np.where(a <= b, 7, 9).tolist()


def test_slct_and_testp():
    a, b, c = integers("u32", 1), integers("u32", 2), integers("s32", 3)
    assert (
        execute("slct.u32.s32 d, a, b, c;", "u32", ("u32", a), ("u32", b), ("s32", c)).tolist()
        == np.where(c >= 0, a, b).tolist()
    )
    x = floats("f32", 3)
    got = execute("testp.subnormal.f32 q, a; selp.u32 d, 1, 0, q;", "u32", ("f32", x))
    assert got.tolist() == [int(v & 0x7F800000 == 0 and v & 0x7FFFFF != 0) for v in x.tolist()]
