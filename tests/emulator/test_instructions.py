"""Instructions one by one against exact arithmetic: Python integers and fractions. Inputs are the awkward ones and random."""

# ruff: noqa: E501 CUDA and PTX texts

import math
from fractions import Fraction

import numpy as np
import pytest

from emulator import load

LANES = 32
_NUMPY = {
    "u8": "u1",
    "s8": "i1",
    "u16": "u2",
    "s16": "i2",
    "u32": "u4",
    "s32": "i4",
    "u64": "u8",
    "s64": "i8",
    "f32": "f4",
    "f64": "f8",
}


def bits_of(t):
    if t.endswith("x2"):
        return 2 * bits_of(t[:-2])
    return (
        32
        if t == "tf32"
        else int("".join(c for c in t.replace("bf16", "f16").replace("e4m3", "8").replace("e5m2", "8") if c.isdigit()))
    )


def words(t):
    return np.dtype(f"u{max(bits_of(t), 8) // 8}")


def execute(instruction, out, *inputs):
    """Runs `instruction` with operands d, a, b, c on 32 lanes; inputs are (type, array); returns d as raw words."""
    arrays = [np.ascontiguousarray(values).view(words(t)) for t, values in inputs]
    result = np.zeros(LANES, words(out))
    registers, loads, names = [], [], "abc"
    for i, (t, _) in enumerate(inputs):
        size = bits_of(t)
        registers.append(f".reg .b{max(size, 16)} {names[i]};")
        loads.append(f"ld.param.u64 p, [p{i}]; mad.wide.u32 p, t, {size // 8}, p; ld.global.b{size} {names[i]}, [p];")
    size = bits_of(out)
    params = ", ".join(f".param .u64 p{i}" for i in range(len(inputs) + 1))
    ptx = f""".version 9.0
.target sm_90a
.address_size 64
.visible .entry kernel({params}) {{
.reg .b32 t; .reg .b64 p; .reg .b{max(size, 16)} d; .reg .pred q, r;
{chr(10).join(registers)}
mov.u32 t, %tid.x;
{chr(10).join(loads)}
{instruction}
ld.param.u64 p, [p{len(inputs)}]; mad.wide.u32 p, t, {size // 8}, p; st.global.b{size} [p], d;
ret;
}}
"""
    load(ptx).launch("kernel", args=[*arrays, result])
    return result


def integers(t, seed):
    low = -(1 << bits_of(t) - 1) if t[0] == "s" else 0
    high = low + (1 << bits_of(t)) - 1
    random = np.random.default_rng(seed)
    edge = [low, high, 0, 1, high - 1, low + 1, high // 2, 5]
    random.shuffle(edge)
    values = (
        edge
        + [int(x) for x in random.integers(low, high, LANES - 8 - 8, dtype=_NUMPY[t], endpoint=True)]
        + [int(x) for x in random.integers(0, 40, 8)]
    )
    return np.array(values, dtype=_NUMPY[t])


def wrap(x, bits):
    return x & ((1 << bits) - 1)


INTEGER_TYPES = ["u16", "s16", "u32", "s32", "u64", "s64"]


def quotient(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


BINARY = {
    "add": lambda a, b, n: a + b,
    "sub": lambda a, b, n: a - b,
    "mul.lo": lambda a, b, n: a * b,
    "mul.hi": lambda a, b, n: (a * b) >> n,
    "min": lambda a, b, n: min(a, b),
    "max": lambda a, b, n: max(a, b),
    "div": lambda a, b, n: quotient(a, b) if b else -1,
    "rem": lambda a, b, n: a - b * quotient(a, b) if b else a,
}


@pytest.mark.parametrize("t", INTEGER_TYPES)
@pytest.mark.parametrize("op", BINARY)
def test_integer_binary(op, t):
    a, b = integers(t, 1), integers(t, 2)
    got = execute(f"{op}.{t} d, a, b;", t, (t, a), (t, b))
    n = bits_of(t)
    assert got.tolist() == [wrap(BINARY[op](int(x), int(y), n), n) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("t", INTEGER_TYPES)
def test_integer_mad(t):
    a, b, c = (integers(t, i) for i in range(3))
    n = bits_of(t)
    rows = [(int(x), int(y), int(z)) for x, y, z in zip(a, b, c, strict=True)]
    assert execute(f"mad.lo.{t} d, a, b, c;", t, (t, a), (t, b), (t, c)).tolist() == [
        wrap(x * y + z, n) for x, y, z in rows
    ]
    if n < 64:
        assert execute(f"mad.hi.{t} d, a, b, c;", t, (t, a), (t, b), (t, c)).tolist() == [
            wrap((x * y >> n) + z, n) for x, y, z in rows
        ]
        wide = t[0] + str(2 * n)
        w = integers(wide, 9)
        got = execute(f"mad.wide.{t} d, a, b, c;", wide, (t, a), (t, b), (wide, w))
        assert got.tolist() == [wrap(x * y + int(z), 2 * n) for (x, y, _), z in zip(rows, w, strict=True)]


def test_integer_saturation_and_unary():
    a, b = integers("s32", 1), integers("s32", 2)
    clamp = lambda x: wrap(max(-(2**31), min(2**31 - 1, x)), 32)  # noqa: E731
    pairs = [(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    assert execute("add.sat.s32 d, a, b;", "s32", ("s32", a), ("s32", b)).tolist() == [clamp(x + y) for x, y in pairs]
    assert execute("sub.sat.s32 d, a, b;", "s32", ("s32", a), ("s32", b)).tolist() == [clamp(x - y) for x, y in pairs]
    assert execute("abs.s32 d, a;", "s32", ("s32", a)).tolist() == [wrap(abs(x), 32) for x, _ in pairs]
    assert execute("neg.s32 d, a;", "s32", ("s32", a)).tolist() == [wrap(-x, 32) for x, _ in pairs]
    c = integers("u32", 3)
    got = execute("sad.s32 d, a, b, c;", "u32", ("s32", a), ("s32", b), ("u32", c))
    assert got.tolist() == [wrap(abs(x - y) + int(z), 32) for (x, y), z in zip(pairs, c, strict=True)]


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_logic_and_shifts(bits):
    t, u, s = f"b{bits}", f"u{bits}", f"s{bits}"
    a, b = integers(u, 1), integers(u, 2)
    n = np.array([0, 1, 5, bits - 1, bits, bits + 1, 200, 2**31] * 4, np.uint32)
    rows = [(int(x), int(y), int(z)) for x, y, z in zip(a, b, n, strict=True)]
    for op, f in {"and": lambda x, y: x & y, "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y}.items():
        assert execute(f"{op}.{t} d, a, b;", u, (u, a), (u, b)).tolist() == [f(x, y) for x, y, _ in rows]
    assert execute(f"not.{t} d, a;", u, (u, a)).tolist() == [wrap(~x, bits) for x, _, _ in rows]
    assert execute(f"shl.{t} d, a, b;", u, (u, a), ("u32", n)).tolist() == [
        wrap(x << z, bits) if z < bits else 0 for x, _, z in rows
    ]
    assert execute(f"shr.{u} d, a, b;", u, (u, a), ("u32", n)).tolist() == [
        x >> z if z < bits else 0 for x, _, z in rows
    ]
    signed = a.view(_NUMPY[s])
    assert execute(f"shr.{s} d, a, b;", s, (s, a), ("u32", n)).tolist() == [
        wrap(int(x) >> min(int(z), bits), bits) for x, z in zip(signed, n, strict=True)
    ]


@pytest.mark.parametrize("bits", [32, 64])
def test_bit_counts(bits):
    u, s = f"u{bits}", f"s{bits}"
    a = integers(u, 1)
    values = [int(x) for x in a]
    assert execute(f"popc.b{bits} d, a;", "u32", (u, a)).tolist() == [x.bit_count() for x in values]
    assert execute(f"clz.b{bits} d, a;", "u32", (u, a)).tolist() == [bits - x.bit_length() for x in values]
    assert execute(f"brev.b{bits} d, a;", u, (u, a)).tolist() == [int(f"{x:0{bits}b}"[::-1], 2) for x in values]
    assert execute(f"bfind.{u} d, a;", "u32", (u, a)).tolist() == [wrap(x.bit_length() - 1, 32) for x in values]
    assert execute(f"bfind.shiftamt.{u} d, a;", "u32", (u, a)).tolist() == [
        bits - x.bit_length() if x else 2**32 - 1 for x in values
    ]
    signed = [int(x) for x in a.view(_NUMPY[s])]
    assert execute(f"bfind.{s} d, a;", "u32", (s, a)).tolist() == [
        wrap((~x if x < 0 else x).bit_length() - 1, 32) for x in signed
    ]
    position = np.array([0, 1, 7, bits - 1, bits, 3, 31, 12] * 4, np.uint32)
    length = np.array([0, 1, 8, 31, bits, 255, 5, 40] * 3 + [9] * 8, np.uint32)

    def field(x, p, n, signed):
        got = wrap((x if signed else wrap(x, bits)) >> p, n) if n else 0
        top = min(p + n - 1, bits - 1)
        if not signed:
            return wrap(wrap(x, bits) >> p, n) if n else 0
        if n == 0:
            return 0
        return wrap(got - (1 << n) if wrap(x, bits) >> top & 1 and n < bits + 1 and got >> (n - 1) & 1 else got, bits)

    rows = list(zip(position.tolist(), length.tolist(), strict=True))
    got = execute(f"bfe.{u} d, a, b, c;", u, (u, a), ("u32", position), ("u32", length))
    assert got.tolist() == [field(x, p, n, False) for x, (p, n) in zip(values, rows, strict=True)]
    got = execute(f"bfe.{s} d, a, b, c;", s, (s, a), ("u32", position), ("u32", length))
    assert got.tolist() == [field(x, p, n, True) for x, (p, n) in zip(signed, rows, strict=True)]
    for p, n in [(0, 8), (5, 12), (bits - 3, 10), (bits, 4), (2, 0), (0, 255)]:
        b = integers(u, 5)
        mask = wrap(wrap(-1, n) << p, bits) if p < bits else 0
        got = execute(f"bfi.b{bits} d, a, b, {p}, {n};", u, (u, a), (u, b))
        assert got.tolist() == [(int(y) & ~mask) | (wrap(x << p, bits) & mask) for x, y in zip(values, b, strict=True)]


def test_permutes_and_funnels():
    a, b, c = (integers("u32", i) for i in range(3))
    rows = [(int(x), int(y), int(z)) for x, y, z in zip(a, b, c, strict=True)]
    three = [("u32", one) for one in (a, b, c)]

    def permute(x, y, z):
        data = x.to_bytes(4, "little") + y.to_bytes(4, "little")
        out = 0
        for i in range(4):
            pick = z >> 4 * i & 15
            byte = data[pick & 7]
            out |= (0xFF * (byte >> 7) if pick & 8 else byte) << 8 * i
        return out

    assert execute("prmt.b32 d, a, b, c;", "u32", *three).tolist() == [permute(*row) for row in rows]
    assert execute("shf.l.wrap.b32 d, a, b, c;", "u32", *three).tolist() == [
        wrap((y << 32 | x) << (z & 31) >> 32, 32) for x, y, z in rows
    ]
    assert execute("shf.l.clamp.b32 d, a, b, c;", "u32", *three).tolist() == [
        wrap((y << 32 | x) << min(z, 32) >> 32, 32) for x, y, z in rows
    ]
    assert execute("shf.r.wrap.b32 d, a, b, c;", "u32", *three).tolist() == [
        wrap((y << 32 | x) >> (z & 31), 32) for x, y, z in rows
    ]
    assert execute("shf.r.clamp.b32 d, a, b, c;", "u32", *three).tolist() == [
        wrap((y << 32 | x) >> min(z, 32), 32) for x, y, z in rows
    ]
    for table in (0x96, 0xE8, 0xCA, 0x01, 0x3C):
        got = execute(f"lop3.b32 d, a, b, c, {table};", "u32", *three)
        expected = [
            sum((table >> ((x >> i & 1) * 4 + (y >> i & 1) * 2 + (z >> i & 1)) & 1) << i for i in range(32))
            for x, y, z in rows
        ]
        assert got.tolist() == expected


@pytest.mark.parametrize("ta", ["u32", "s32"])
@pytest.mark.parametrize("tb", ["u32", "s32"])
def test_dot_products(ta, tb):
    a, b, c = (integers("u32", i) for i in range(3))
    x4 = a.view("i1" if ta[0] == "s" else "u1").reshape(32, 4).astype(int)
    y4 = b.view("i1" if tb[0] == "s" else "u1").reshape(32, 4).astype(int)
    three = [("u32", one) for one in (a, b, c)]
    assert execute(f"dp4a.{ta}.{tb} d, a, b, c;", "u32", *three).tolist() == [
        wrap(int((x4[i] * y4[i]).sum()) + int(c[i]), 32) for i in range(32)
    ]
    x2 = a.view("i2" if ta[0] == "s" else "u2").reshape(32, 2).astype(int)
    for half, part in (("lo", y4[:, :2]), ("hi", y4[:, 2:])):
        got = execute(f"dp2a.{half}.{ta}.{tb} d, a, b, c;", "u32", *three)
        assert got.tolist() == [wrap(int((x2[i] * part[i]).sum()) + int(c[i]), 32) for i in range(32)]


# ---- floats: exact fractions, rounded once

FORMATS = {"f16": (5, 10), "bf16": (8, 7), "tf32": (8, 10), "f32": (8, 23), "f64": (11, 52)}


def to_number(code, t):
    """The value of a code: a Fraction, or a float infinity or NaN; with the sign of zero as a float."""
    e_bits, m_bits = FORMATS[t]
    sign = -1 if code >> (e_bits + m_bits) & 1 else 1
    e, m = code >> m_bits & ((1 << e_bits) - 1), code & ((1 << m_bits) - 1)
    bias = (1 << e_bits - 1) - 1
    if e == (1 << e_bits) - 1:
        return math.nan if m else sign * math.inf
    if e == 0 and m == 0:
        return sign * 0.0
    return sign * (Fraction(m, 1 << m_bits) + (1 if e else 0)) * Fraction(2) ** (max(e, 1) - bias)


def to_code(x, t, mode="rn", negative_zero=False):
    e_bits, m_bits = FORMATS[t]
    bias, top = (1 << e_bits - 1) - 1, ((1 << e_bits) - 1) << m_bits
    sign_bit = 1 << (e_bits + m_bits)
    if isinstance(x, float):
        if math.isnan(x):
            return None
        if math.isinf(x):
            return top | (sign_bit if x < 0 else 0)
        return sign_bit if math.copysign(1, x) < 0 else 0
    if x == 0:
        return sign_bit if negative_zero else 0
    size = abs(x)
    e = max(math.floor(math.log2(size.numerator) - math.log2(size.denominator)) - 1, -1100)
    while Fraction(2) ** (e + 1) <= size:
        e += 1
    e = max(e, 1 - bias)
    scaled = size / Fraction(2) ** (e - m_bits)
    whole, rest = scaled.numerator // scaled.denominator, scaled - scaled.numerator // scaled.denominator
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1),
        "rna": rest >= Fraction(1, 2),
        "rz": False,
        "rm": x < 0 and rest > 0,
        "rp": x > 0 and rest > 0,
    }[mode]
    code = whole + up + ((e + bias - 1) << m_bits)
    if code >= top:
        stays = mode == "rz" or (mode == "rm" and x > 0) or (mode == "rp" and x < 0)
        code = top - 1 if stays else top
    return code | (sign_bit if x < 0 else 0)


def floats(t, seed):
    e_bits, m_bits = FORMATS[t]
    total = e_bits + m_bits
    top = ((1 << e_bits) - 1) << m_bits
    random = np.random.default_rng(seed)
    edge = [0, 1 << total, 1, top - 1, top, 1 << m_bits, (1 << m_bits) - 1, top | 1 << total]
    random.shuffle(edge)
    middle = ((1 << e_bits - 1) - 1) << m_bits  # 1.0
    codes = edge + [middle + int(x) for x in random.integers(-(3 << m_bits), 3 << m_bits, 16)]
    codes += [int(x) for x in random.integers(0, top, 8)]
    codes = [c | int(s) << total for c, s in zip(codes, random.integers(0, 2, LANES), strict=True)]
    if t == "tf32":
        codes = [c << 13 for c in codes]
    return np.array(codes, words(t))


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


# ---- conversions


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


# ---- comparisons


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


# ---- warp collectives


def test_shuffles():
    a = np.arange(100, 132, dtype=np.uint32)
    lane = np.arange(32)
    got = execute("shfl.sync.up.b32 d|q, a, 3, 0, -1; @!q add.u32 d, d, 1000;", "u32", ("u32", a))
    assert got.tolist() == np.where(lane >= 3, a[lane - 3], a + 1000).tolist()
    got = execute("shfl.sync.down.b32 d|q, a, 5, 31, -1; @!q add.u32 d, d, 1000;", "u32", ("u32", a))
    assert got.tolist() == np.where(lane < 27, a[(lane + 5) % 32], a + 1000).tolist()
    got = execute("shfl.sync.bfly.b32 d, a, 6, 31, -1;", "u32", ("u32", a))
    assert got.tolist() == a[lane ^ 6].tolist()
    got = execute("shfl.sync.idx.b32 d, a, 3, 0x181f, -1;", "u32", ("u32", a))  # segments of 8
    assert got.tolist() == a[lane // 8 * 8 + 3].tolist()


def test_votes_matches_and_reductions():
    a = integers("u32", 4)
    a[::5] = 77
    odd = (a & 1).astype(bool)
    prefix = "and.b32 d, a, 1; setp.eq.u32 q, d, 1; "
    ballot = int(sum(1 << i for i in range(32) if odd[i]))
    assert execute(prefix + "vote.sync.ballot.b32 d, q, -1;", "u32", ("u32", a)).tolist() == [ballot] * 32
    assert execute(prefix + "vote.sync.any.pred r, q, -1; selp.u32 d, 1, 0, r;", "u32", ("u32", a)).tolist() == [1] * 32
    assert execute(prefix + "vote.sync.all.pred r, q, -1; selp.u32 d, 1, 0, r;", "u32", ("u32", a)).tolist() == [0] * 32
    got = execute("match.any.sync.b32 d, a, -1;", "u32", ("u32", a))
    assert got.tolist() == [sum(1 << k for k in range(32) if a[k] == a[i]) for i in range(32)]
    values = [int(x) for x in a]
    signed = [int(x) for x in a.view(np.int32)]
    for op, expected in {
        "add.u32": wrap(sum(values), 32), "min.u32": min(values), "max.u32": max(values), "min.s32": wrap(min(signed), 32),
        "max.s32": wrap(max(signed), 32), "and.b32": int(np.bitwise_and.reduce(a)), "or.b32": int(np.bitwise_or.reduce(a)),
        "xor.b32": int(np.bitwise_xor.reduce(a)),
    }.items():  # fmt: skip
        assert execute(f"redux.sync.{op} d, a, -1;", "u32", ("u32", a)).tolist() == [expected] * 32
    got = execute("elect.sync d|q, -1; @q add.u32 d, d, 50;", "u32", ("u32", a))
    assert got.tolist() == [50] + [0] * 31


# ---- packed arithmetic


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
