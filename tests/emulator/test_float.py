"""Float and half arithmetic against exact fractions, rounded once; approximations against numpy."""

# ruff: noqa: E501 PTX texts

import math
from fractions import Fraction

import numpy as np
import pytest

from emulator.instruction_runner import LANES, execute, floats, integers, to_code, to_number


def exact(op, values):
    """The exact result, floats where infinities or NaN take part."""
    if all(isinstance(v, Fraction) or v == 0 for v in values):
        a, b, *c = [Fraction(v) for v in values]
        result = {"add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b, "fma": lambda: a * b + c[0]}[op]()
        if result != 0:
            return result
    f = [float(np.float64(v)) if isinstance(v, float) else (1.0 if v > 0 else -1.0) for v in values]
    if op == "fma":
        product = f[0] * f[1]
        return product + f[2] if math.isinf(product) or math.isnan(product) or isinstance(values[2], float) else "zero"
    return (
        {"add": f[0] + f[1], "sub": f[0] - f[1], "mul": f[0] * f[1]}[op]
        if any(isinstance(v, float) for v in values)
        else "zero"
    )


def compare_floats(got, op, t, mode, inputs):
    for lane in range(LANES):
        values = [to_number(int(x[lane]), t) for x in inputs]
        result = exact(op, values)
        code = int(got[lane])
        number = to_number(code, t)
        if isinstance(result, str) or result == 0:
            assert number == 0, (op, mode, values, hex(code))
        elif isinstance(result, float) and math.isnan(result):
            assert isinstance(number, float) and math.isnan(number), (op, values, hex(code))
        elif isinstance(result, float) and not math.isinf(result):  # finite inputs beside a zero
            continue
        else:
            assert code == to_code(result, t, mode), (op, mode, values, hex(code), hex(to_code(result, t, mode)))


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("t", ["f32", "f64"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
def test_float_arithmetic(op, t, mode):
    inputs = [floats(t, seed) for seed in range(3 if op == "fma" else 2)]
    operands = "a, b, c" if op == "fma" else "a, b"
    got = execute(f"{op}.{mode}.{t} d, {operands};", t, *[(t, x) for x in inputs])
    compare_floats(got, op, t, mode, inputs)


@pytest.mark.parametrize("t", ["f16", "bf16"])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
def test_half_arithmetic(op, pair, t):
    for seed in range(4):
        count = 3 if op == "fma" else 2
        operands = "a, b, c" if op == "fma" else "a, b"
        low, high = ([floats(t, 10 * seed + 3 * part + i) for i in range(count)] for part in range(2))
        if not pair:
            got = execute(f"{op}.rn.{t} d, {operands};", t, *[(t, x) for x in low])
            compare_floats(got, op, t, "rn", low)
            continue
        both = [x.astype(np.uint32) | y.astype(np.uint32) << 16 for x, y in zip(low, high, strict=True)]
        got = execute(f"{op}.rn.{t}x2 d, {operands};", t + "x2", *[(t + "x2", x) for x in both])
        compare_floats(got & 0xFFFF, op, t, "rn", low)
        compare_floats(got >> 16, op, t, "rn", high)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_division_and_root(mode):
    a, b = np.abs(floats("f32", 1).view(np.float32)), floats("f32", 2).view(np.float32)
    keep = np.isfinite(a) & np.isfinite(b) & (b != 0) & (a != 0)
    got = execute(f"div.{mode}.f32 d, a, b;", "f32", ("f32", a), ("f32", b))
    reciprocal = execute(f"rcp.{mode}.f32 d, a;", "f32", ("f32", b))
    root = execute(f"sqrt.{mode}.f32 d, a;", "f32", ("f32", a))
    for i in np.nonzero(keep)[0]:
        x, y = Fraction(float(a[i])), Fraction(float(b[i]))
        assert int(got[i]) == to_code(x / y, "f32", mode)
        assert int(reciprocal[i]) == to_code(1 / y, "f32", mode)
        scale = 2**400
        near = Fraction(math.isqrt(x.numerator * x.denominator * scale * scale), x.denominator * scale)
        if near * near != x:
            near += Fraction(1, scale * scale * x.denominator)  # not exact: a little more, never a tie
        assert int(root[i]) == to_code(near, "f32", mode)


def test_ftz_sat_and_extremes():
    a, b = floats("f32", 5), floats("f32", 6)
    x, y = a.view(np.float32), b.view(np.float32)
    flush = lambda v: np.where((v.view(np.uint32) & 0x7F800000) == 0, np.copysign(np.float32(0), v), v)  # noqa: E731
    with np.errstate(all="ignore"):
        got = execute("add.ftz.f32 d, a, b;", "f32", ("f32", a), ("f32", b)).view(np.float32)
        np.testing.assert_array_equal(got, flush(flush(x) + flush(y)))
        got = execute("mul.sat.f32 d, a, b;", "f32", ("f32", a), ("f32", b)).view(np.float32)
        product = x * y
        np.testing.assert_array_equal(got, np.where(np.isnan(product), 0, np.clip(product, 0, 1)))
    x = np.array([np.nan, 1, -0.0, 0.0, 3, np.nan, -5, 2] * 4, np.float32)
    y = np.array([2, np.nan, 0.0, -0.0, 1, np.nan, 4, 2] * 4, np.float32)
    assert execute("min.f32 d, a, b;", "f32", ("f32", x), ("f32", y)).view(np.float32)[:5].tolist() == [
        2,
        1,
        -0.0,
        -0.0,
        1,
    ]
    assert np.isnan(execute("max.NaN.f32 d, a, b;", "f32", ("f32", x), ("f32", y)).view(np.float32)[[0, 1, 5]]).all()
    assert execute("max.f32 d, a, b;", "f32", ("f32", x), ("f32", y)).view(np.float32)[6] == 4
    assert execute("max.xorsign.abs.f32 d, a, b;", "f32", ("f32", x), ("f32", y)).view(np.float32)[6] == -5


@pytest.mark.parametrize("op, f, inputs", [
    ("ex2.approx.ftz", np.exp2, (-20, 20)), ("lg2.approx", np.log2, (0.01, 100)), ("rcp.approx.ftz", lambda x: 1 / x, (0.1, 9)),
    ("rsqrt.approx", lambda x: x**-0.5, (0.1, 9)), ("sqrt.approx", np.sqrt, (0.1, 9)), ("sin.approx", np.sin, (-3, 3)),
    ("cos.approx", np.cos, (-3, 3)), ("tanh.approx", np.tanh, (-3, 3)),
])  # fmt: skip
def test_approximations(op, f, inputs):
    x = np.random.default_rng(0).uniform(*inputs, 32).astype(np.float32)
    np.testing.assert_allclose(
        execute(f"{op}.f32 d, a;", "f32", ("f32", x)).view(np.float32), f(x.astype(np.float64)), rtol=2e-6, atol=1e-6
    )


def test_packed_floats_and_integers():
    a, b, c = (np.random.default_rng(i).standard_normal((32, 2)).astype(np.float32) for i in range(3))
    pairs = [("f32x2", one.reshape(-1).view(np.uint64)) for one in (a, b, c)]
    np.testing.assert_array_equal(
        execute("add.rn.f32x2 d, a, b;", "f32x2", *pairs[:2]).view(np.float32).reshape(32, 2), a + b
    )
    np.testing.assert_array_equal(
        execute("mul.rn.f32x2 d, a, b;", "f32x2", *pairs[:2]).view(np.float32).reshape(32, 2), a * b
    )
    fused = execute("fma.rn.f32x2 d, a, b, c;", "f32x2", *pairs).view(np.float32).reshape(32, 2)
    np.testing.assert_array_equal(fused, (a.astype(np.float64) * b + c).astype(np.float32))
    x, y = integers("u32", 1), integers("u32", 2)
    for t, view in (("u16x2", np.uint16), ("s16x2", np.int16)):
        for op, f in {"add": np.add, "min": np.minimum, "max": np.maximum}.items():
            got = execute(f"{op}.{t} d, a, b;", "u32", ("u32", x), ("u32", y))
            np.testing.assert_array_equal(got.view(view), f(x.view(view), y.view(view)))


@pytest.mark.parametrize("t", ["f16", "bf16"])
def test_half_extremes(t):
    a, b = floats(t, 1), floats(t, 2)
    for op, nan in (("min", False), ("max", False), ("min.NaN", True), ("max.NaN", True)):
        got = execute(f"{op}.{t} d, a, b;", t, (t, a), (t, b))
        for x, y, word in zip(a, b, got, strict=True):
            p, q, r = (float(to_number(int(one), t)) for one in (x, y, word))
            if math.isnan(p) or math.isnan(q):
                expected = math.nan if nan or (math.isnan(p) and math.isnan(q)) else q if math.isnan(p) else p
            else:
                expected = min(p, q) if op.startswith("min") else max(p, q)
            assert math.isnan(r) if math.isnan(expected) else r == expected
    relu = execute(f"fma.rn.relu.{t} d, a, b, c;", t, (t, a), (t, b), (t, floats(t, 3)))
    plain = execute(f"fma.rn.{t} d, a, b, c;", t, (t, a), (t, b), (t, floats(t, 3)))
    for x, y in zip(plain, relu, strict=True):
        p, r = float(to_number(int(x), t)), float(to_number(int(y), t))
        assert math.isnan(r) if math.isnan(p) else r == max(p, 0)
    low = execute(f"abs.{t} d, a;", t, (t, a)).tolist()
    assert low == (a & 0x7FFF).tolist() and execute(f"neg.{t} d, a;", t, (t, a)).tolist() == (a ^ 0x8000).tolist()
