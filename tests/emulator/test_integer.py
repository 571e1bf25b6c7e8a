"""Integer instructions and bit fields against Python integers."""

# ruff: noqa: E501 PTX texts

import numpy as np
import pytest

from emulator.instruction_runner import INTEGER_TYPES, NUMPY, bits_of, execute, integers, wrap


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
    signed = a.view(NUMPY[s])
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
    signed = [int(x) for x in a.view(NUMPY[s])]
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


@pytest.mark.parametrize("t", ["u32", "s32"])
@pytest.mark.parametrize("parts", [2, 4])
def test_packed_differences(parts, t):
    a, b, c = (integers("u32", i) for i in range(3))
    kind = f"{'i' if t == 's32' else 'u'}{4 // parts}"
    x, y = (one.view(kind).reshape(32, parts).astype(int) for one in (a, b))
    three = [("u32", one) for one in (a, b, c)]
    got = execute(f"vabsdiff{parts}.u32.{t}.{t} d, a, b, c;", "u32", *three)
    np.testing.assert_array_equal(got.view(f"u{4 // parts}").reshape(32, parts), np.abs(x - y))
    got = execute(f"vabsdiff{parts}.u32.{t}.{t}.add d, a, b, c;", "u32", *three)
    assert got.tolist() == [wrap(int(np.abs(x[i] - y[i]).sum()) + int(c[i]), 32) for i in range(32)]


@pytest.mark.parametrize("t", ["u32", "s32", "u64", "s64"])
def test_carries(t):
    """Numbers of two words: sums, differences and products as the compiler makes them of words."""
    n, u = bits_of(t), f"u{bits_of(t)}"
    a, b, c, e = (integers(u, i) for i in range(4))
    a[:6], b[:6], c[:6], e[:6] = 2**n - 1, [0, 1, 1, 2**n - 1, 5, 0], 2**n - 1, [0, 1, 0, 0, 2**n - 1, 1]
    rows = [tuple(int(v) for v in row) for row in zip(a, b, c, e, strict=True)]
    wide = [((y << n) + x, (w << n) + z) for x, y, z, w in rows]  # a low, b high; c low, e high
    four = [(u, one) for one in (a, b, c, e)]

    def check(instructions, expected):
        got = execute(f".reg .b{n} low, high, top; {instructions}", u, *four)
        assert got.tolist() == [wrap(x, n) for x in expected]

    for part, shift in (("low", 0), ("high", n)):
        end = f" mov.b{n} d, {part};"
        check(f"add.cc.{t} low, a, c; addc.{t} high, b, e;{end}", [(x + y) >> shift for x, y in wide])
        check(f"sub.cc.{t} low, a, c; subc.{t} high, b, e;{end}", [(x - y) >> shift for x, y in wide])
    check(f"add.cc.{t} low, a, c; addc.cc.{t} high, b, e; addc.{t} d, 0, 0;", [(x + y) >> 2 * n for x, y in wide])
    check(f"sub.cc.{t} low, a, c; subc.cc.{t} high, b, e; subc.{t} d, 0, 0;", [(x - y) >> 2 * n for x, y in wide])

    check(f"sub.cc.{t} low, a, c; addc.{t} d, 0, 0;", [int(x >= z) for x, _, z, _ in rows])  # 1: nothing borrowed

    def signed(x):
        return x - (1 << n) if t[0] == "s" and x >> n - 1 else x

    for part, shift in (("low", 0), ("high", n)):
        check(
            f"mad.lo.cc.{t} low, a, b, c; madc.hi.{t} high, a, b, e; mov.b{n} d, {part};",
            [(signed(x) * signed(y) + z + (w << n)) >> shift for x, y, z, w in rows],
        )
